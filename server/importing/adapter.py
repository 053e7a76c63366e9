"""LoRA adapters in peft's format: merges one with its base into a model directory, which is imported like any other.

An adapter's directory has adapter_config.json and adapter_model.safetensors. Merged, a layer's weight is
`W + scale * B @ A` ("LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., section 4.1).
"""

import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.folder_files import cached_folder, read_object, require_own_files, require_possible
from cohabit.server.importing.model_files import ADAPTER_CONFIG
from cohabit.server.importing.subject import reason_of

_WEIGHTS, _CONFIG, _PREFIX = "adapter_model.safetensors", "config.json", "base_model.model."
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save)(?=\.)")
"""Parts of names of layers that peft has wrapped, which are also those of biases that it saves."""
_FACTORS = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
_LAYER = re.compile(r"[\w.]+", re.ASCII)
_TASKS = {
    "SEQ_CLS": "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLS": "TOKEN_CLASSIFICATION",
    "QUESTION_ANS": "QUESTION_ANSWERING",
    "CAUSAL_LM": "CAUSAL_LM",
}
"""Names of transformers' classes for peft's tasks. An adapter without a task, or for features, has the base's class."""
_KEEPING = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base's weights as they are."""
_OTHER_FORMS = ("use_dora", "layer_replication", "alora_invocation_tokens", "target_parameters")
_NOT_COPIED = ("adapter_", "config.json", "model.", "pytorch_model", "README", "training_args")
"""Beginnings of the names of files that are not copied into the merged directory."""


class _AdapterConfig(msgspec.Struct, frozen=True):
    """Fields of adapter_config.json. Others are for training, or repeat what the tensors say."""

    peft_type: str = ""
    base_model_name_or_path: str | None = None
    task_type: str | None = None
    r: int = 8
    rank_pattern: dict[str, int] | None = None
    """`r` of some layers."""
    lora_alpha: float = 8.0
    alpha_pattern: dict[str, float] | None = None
    """`lora_alpha` of some layers, by the ends of their names."""
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True


def base_of(adapter: Path, given: str | None) -> Path:
    """Return the folder of an adapter's base: `given`, or the one that its configuration names. Raises ImportFailed."""
    name = given or _config_of(adapter).base_model_name_or_path
    if not name:
        raise ImportFailed(f"{adapter / ADAPTER_CONFIG} does not name the base; give its folder with --base")
    try:
        folder = Path(name) if Path(name).is_dir() else cached_folder(name)
    except ImportFailed as error:
        raise ImportFailed(f"{adapter}: its base {error}. --base names another folder") from error
    if not (folder / _CONFIG).is_file():
        raise ImportFailed(f"{adapter}: its base {folder} is not a model directory: it has no {_CONFIG}")
    return folder


def merge(adapter: Path, base: Path, merged: Path) -> None:
    """Write a model directory with an adapter's weights merged into those of its base. Raises ImportFailed.

    Files of a tokenizer are the adapter's own where it has some, else the base's.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from cohabit.server.importing.huggingface import load_model, transformers_of

    transformers = transformers_of(adapter)
    for folder in (adapter, base):
        require_own_files(folder)
    if not (adapter / _WEIGHTS).is_file():
        raise ImportFailed(f"{adapter} has no {_WEIGHTS}; save the adapter again with peft's save_pretrained")
    config = _config_of(adapter)
    try:
        read = {name.removeprefix(_PREFIX): t.float() for name, t in load_file(adapter / _WEIGHTS).items()}
    except (SafetensorError, OSError) as error:
        raise ImportFailed(f"{adapter / _WEIGHTS}: {reason_of(error)}") from error
    if unfit := [name for name, tensor in read.items() if not tensor.isfinite().all()]:
        raise ImportFailed(f"{adapter / _WEIGHTS}: {unfit[0]} has numbers that are NaN or infinite")
    # Each layer's factors by its name; other tensors, such as a classifier, replace the base's.
    factors: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in read.items():
        if ".original_module." in name:
            continue  # what a module that is saved whole has replaced
        if (found := _FACTORS.fullmatch(name)) is None:
            whole[_WRAPPED.sub("", name)] = tensor
        else:
            factors.setdefault(found[1], {})[found[2]] = tensor
    written = read_object(base / _CONFIG)
    require_possible(base / _CONFIG, written)
    asked = _class_of(adapter, config, written)
    labels = _labels(transformers, base, asked, whole)
    model = load_model(transformers, base, written, asked, whole.keys(), labels)
    with torch.no_grad():
        for name, tensor in whole.items():
            _parameter(adapter, model, name, tensor.shape).copy_(tensor)
        for layer, own in factors.items():
            change = _product(adapter, config, model, layer, own)
            _parameter(adapter, model, f"{layer}.weight", change.shape).add_(
                change * _scale(config, layer, own["A"])
            )
    model.save_pretrained(merged)
    for folder in (base, adapter):
        kept = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(_NOT_COPIED)]
        for path in (*kept, *folder.glob(f"*/{_CONFIG}")):  # a module of sentence-transformers has its own folder
            target = merged / path.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def _config_of(adapter: Path) -> _AdapterConfig:
    """Read adapter_config.json. Raises ImportFailed for an adapter that is not supported."""
    where = adapter / ADAPTER_CONFIG
    written = read_object(where)
    try:
        config = msgspec.convert(written, _AdapterConfig)
    except msgspec.ValidationError as error:
        raise ImportFailed(f"{where}: {error}") from error
    if config.peft_type != "LORA":
        kind = config.peft_type or "missing"
        raise ImportFailed(
            f"{where}: peft_type is {kind}; only LORA is supported. Merge it with peft, and import that"
        )
    for key in _OTHER_FORMS:
        if written.get(key):
            raise ImportFailed(f"{where}: {key} is not supported; merge the adapter with peft, and import that")
    if config.init_lora_weights not in _KEEPING:
        raise ImportFailed(
            f"{where}: init_lora_weights is {config.init_lora_weights}, which changes the base's weights; save the"
            " adapter with peft's path_initial_model_for_weight_conversion"
        )
    for pattern in config.alpha_pattern or ():
        if not _LAYER.fullmatch(pattern):
            raise ImportFailed(
                f"{where}: alpha_pattern has '{pattern[:80]}', which is not the end of a layer's name"
            )
    return config


def _class_of(adapter: Path, config: _AdapterConfig, written: Mapping[str, Any]) -> str | None:
    """Return the name of the class that an adapter was trained for; None for the base's own."""
    from transformers.models.auto import modeling_auto

    task = config.task_type
    if task is None or task == "FEATURE_EXTRACTION":
        return None
    names = getattr(modeling_auto, f"MODEL_FOR_{_TASKS.get(task, task)}_MAPPING_NAMES", {})
    if (name := names.get(written.get("model_type"))) is None:
        raise ImportFailed(
            f"{adapter / ADAPTER_CONFIG}: transformers has no {written.get('model_type')} model for task_type {task};"
            f" supported are {', '.join(_TASKS)}"
        )
    return str(name)


def _labels(transformers: Any, base: Path, asked: str | None, whole: Mapping[str, torch.Tensor]) -> int | None:
    """Return the number of classes of an adapter's own classifier, if it is another than the base's."""
    if asked is None:
        return None
    architecture = getattr(transformers, asked)
    try:
        config = architecture.config_class.from_pretrained(base, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            known = architecture(config).state_dict()
    except Exception as error:  # as it is for a configuration of impossible sizes
        raise ImportFailed(f"{base}: {reason_of(error)}") from error
    counts = {
        len(tensor)
        for name, tensor in whole.items()
        if name in known and tensor.shape[1:] == known[name].shape[1:] and len(known[name]) == config.num_labels
    }
    return counts.pop() if len(counts) == 1 else None


def _scale(config: _AdapterConfig, layer: str, a: torch.Tensor) -> float:
    own = (alpha for end, alpha in (config.alpha_pattern or {}).items() if f".{layer}".endswith(f".{end}"))
    return next(own, config.lora_alpha) / (math.sqrt(a.shape[0]) if config.use_rslora else a.shape[0])


def _product(
    adapter: Path, config: _AdapterConfig, model: nn.Module, layer: str, own: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return `B @ A` in the form of a layer's weight. Raises ImportFailed."""
    try:
        module = model.get_submodule(layer)
        a, b = own["A"], own["B"]
        product = b.flatten(1) @ a.flatten(1)
    except (AttributeError, KeyError, RuntimeError) as error:
        raise ImportFailed(
            f"{adapter / _WEIGHTS}: {layer} is not a layer of the base with factors A and B"
        ) from error
    if len(a) not in (config.r, *(config.rank_pattern or {}).values()):
        raise ImportFailed(
            f"{adapter / _WEIGHTS}: the factors of {layer} have the rank {len(a)}, {ADAPTER_CONFIG} has r {config.r}"
        )
    if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D":  # as GPT-2 has: inputs come first
        return product.t()
    return product.view(b.shape[0], *a.shape[1:])


def _parameter(adapter: Path, model: nn.Module, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a parameter or buffer to change. Raises ImportFailed if it has another shape, or is tied."""
    tensors = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
    found = tensors.get(name)
    if found is None or found.shape != shape:
        there = "is not there" if found is None else f"has the shape {tuple(found.shape)}"
        raise ImportFailed(
            f"{adapter / _WEIGHTS} changes {name} of shape {tuple(shape)}, which {there} in the base"
        )
    if len(tied := [other for other, tensor in tensors.items() if tensor is found]) > 1:
        raise ImportFailed(f"{adapter / _WEIGHTS} changes {name}, which is tied: {', '.join(tied)} are one tensor")
    return found

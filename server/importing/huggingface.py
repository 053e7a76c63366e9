"""Hugging Face models: a directory with config.json and safetensors becomes a module with known inputs."""

import inspect
import json
import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.declared_input import DeclaredInput, largest_size
from cohabit.server.importing.folder_files import read_object, require_own_files, require_possible
from cohabit.server.importing.folder_tokenizer import FolderTokenizer, entry_tokenizer
from cohabit.server.importing.generation import generating, is_causal
from cohabit.server.importing.huggingface_inputs import (
    ANY_LENGTH,
    DECLARE,
    IMAGES,
    MASK,
    TOKENS,
    Lengths,
    inputs_of,
    most_tokens,
    tensors_of,
)
from cohabit.server.importing.subject import (
    Subject,
    Tensors,
    declared,
    outputs_of_rows,
    reason_of,
    with_signature,
)
from cohabit.server.ipc.model import POOLINGS

_CONFIG = "config.json"
_MODULES, _POOLING = "modules.json", "1_Pooling"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that `/v1/embeddings` stands for."""
_LEGACY_POOLING = "pooling_mode_"
_LEGACY_NAME = re.compile("^pooling_mode_|(?<!last)_?tokens?$")
_MOST_KEYS = 3
_EXPERTS = "batched_mm"
"""Implementation of experts: only aten operators, whichever tokens the experts get."""


class NamedOutputs(nn.Module):
    """A model of transformers that takes the named inputs, and returns only its tensors, by name.

    With `outputs` it returns only these.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], outputs: Sequence[str] | None = None) -> None:
        super().__init__()
        self.model = model
        self.forward = with_signature(partial(_named_tensors, model, outputs), names)


def _named_tensors(model: nn.Module, wanted: Sequence[str] | None, **inputs: torch.Tensor) -> Tensors:
    outputs = model(**inputs, return_dict=True)
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    return tensors if wanted is None else {name: tensors[name] for name in wanted}


def is_folder(path: Path) -> bool:
    return (path / _CONFIG).is_file()


def from_folder(
    folder: Path,
    inputs: Sequence[DeclaredInput] = (),
    lengths: Lengths = ANY_LENGTH,
    architecture: str | None = None,
    outputs: Sequence[str] = (),
) -> Subject:
    """Load a model in float32, without running the folder's own code or using the network. Raises ImportFailed.

    `architecture` is a class of transformers, or of one part of the model, instead of the folder's own. `outputs` are
    the outputs to return; by default, all that have a row for each row of the inputs.
    """
    transformers = transformers_of(folder)
    # The folder is checked before transformers reads it.
    require_own_files(folder)
    written = read_object(folder / _CONFIG)
    require_possible(folder / _CONFIG, written)
    model = load_model(transformers, folder, written, architecture)
    # A causal model becomes a decoding step, if possible; otherwise it answers whole texts.
    most, left, notes = 0, list[str](), list[str]()
    if is_causal(written) and not (inputs or architecture or outputs or lengths.fixed):
        context, said = most_tokens(folder, model.config, model, lengths)
        try:
            return generating(folder, model, context, lengths.most is None, (*said, *_notes(written, None)))
        except ImportFailed as error:
            notes.append(f"it does not generate token by token, but answers whole texts with logits: {error}")
    # Inputs are the declared ones, or those that the configuration implies.
    has_declared_sizes = bool(inputs)
    if not inputs:
        taken = inputs_of(folder, model.config, model, lengths)
        inputs, most, notes = taken.inputs, taken.most_tokens, [*notes, *taken.notes]
        left = [name for name in tensors_of(model) if name not in {given.name for given in inputs}]
    else:
        most = largest_size(inputs, lengths.most)
    names = [given.name for given in inputs]
    try:
        subject = declared(NamedOutputs(model, names), inputs, most, has_declared_sizes)
    except ImportFailed as error:
        if left:
            raise ImportFailed(f"{error}. It also takes {', '.join(left)}; {DECLARE}") from error
        raise
    # Examples with padding, and outputs with a row per input row.
    if MASK in names:
        subject = with_padding(subject)
    kept, dropped = outputs_of_rows(folder, subject, outputs)
    images = tuple(given.name for given in inputs if given.name == IMAGES and len(given.dims) == 4)
    tokenizer, pooling, unlike = text_parts(folder, takes_tokens=TOKENS in names)
    notes.extend(unlike)
    if dropped:
        notes.append(f"not an output of the entry, because they have no row for each row: {', '.join(dropped)}")
    if left:
        notes.append(f"the model also takes {', '.join(left)}, which the entry does not; {DECLARE}")
    return replace(
        subject,
        module=NamedOutputs(model, names, kept).eval(),
        classes=_classes(model.config, written),
        images=images,
        tokenizer=tokenizer,
        pooling=pooling,
        notes=(*notes, *_notes(written, pooling)),
    )


def transformers_of(folder: Path) -> Any:
    """Import transformers for a folder, quiet and without the network. Raises ImportFailed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportFailed(
            f"{folder}: Hugging Face models need the package {error.name}; pip install 'transformers>=5'"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def load_model(
    transformers: Any,
    folder: Path,
    written: dict[str, Any],
    asked: str | None,
    given: Collection[str] = (),
    labels: int | None = None,
) -> Any:
    """Load the folder's model, or the requested one: another class, or a part of the folder's.

    The caller sets the weights with the `given` names, which the folder may lack. `labels` is the number of classes if
    it is not the folder's. Raises ImportFailed.
    """
    if written.get("quantization_config"):
        raise ImportFailed(f"{folder}: its weights are quantized, which is not supported; take the original ones")
    names = written.get("architectures") or []
    # The class: a requested one of transformers, the folder's, or AutoModel.
    whole = asked if asked is not None and _is_model(getattr(transformers, asked, None)) else None
    names = [whole] if whole else names
    architecture: Any = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
    if names and not _is_model(architecture):
        own = "; its own code is never run" if "auto_map" in written else ""
        raise ImportFailed(
            f"{folder}: transformers {transformers.__version__} has no architecture {names[0]}{own}. Write a function"
            " that makes the module, and import it as module:function"
        )
    # Weights: safetensors if there are any, else pickles, from which only tensors are read.
    safe = any(folder.glob("*.safetensors"))
    if not safe and not any(folder.glob("*.bin")):
        raise ImportFailed(f"{folder} has no weights: there is no *.safetensors in it")
    try:
        configuration = architecture.config_class if whole else transformers.AutoConfig
        config = configuration.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.use_cache = False
        if labels is not None:
            config.num_labels = labels
        model, info = architecture.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=safe,
            weights_only=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=labels is not None,
        )
    except Exception as error:
        what = "" if safe else " (a pickle; only its tensors are read)"
        raise ImportFailed(f"{folder}{what}: {reason_of(error)}") from error
    # Missing weights would be random.
    other_sizes = {name for name, *_ in info["mismatched_keys"]}
    if missing := sorted((other_sizes | set(info["missing_keys"])).difference(given)):
        more = f" and {len(missing) - _MOST_KEYS} more" if len(missing) > _MOST_KEYS else ""
        raise ImportFailed(
            f"{folder}: its weights lack {', '.join(missing[:_MOST_KEYS])}{more} of {architecture.__name__}, and random"
            " ones would answer nonsense; set `architectures` of config.json to the class that was trained"
        )
    model.set_experts_implementation(_EXPERTS)
    # A requested class that is not in transformers is a part of the model.
    if asked is not None and whole is None:
        model = _part(folder, model, asked)
    if any(name.startswith("decoder_input_") for name in inspect.signature(model.forward).parameters):
        encoder = type(model.get_encoder()).__name__
        raise ImportFailed(
            f"{folder}: {type(model).__name__} is an encoder with a decoder, which is not supported; its encoder alone"
            f" can be imported with --architecture {encoder}"
        )
    return model


def _is_model(named: Any) -> bool:
    return inspect.isclass(named) and issubclass(named, nn.Module)


def _is_part(module: nn.Module) -> bool:
    """Whether a part of a model is itself a model: transformers' own base class states its inputs."""
    return hasattr(module, "main_input_name") and hasattr(module, "config")


def _part(folder: Path, model: Any, asked: str) -> nn.Module:
    """Return the part of a model with the requested class: the encoder, if its decoder has the same class.

    Raises ImportFailed unless exactly one part has it.
    """
    parts: list[nn.Module] = [part for part in model.modules() if part is not model and _is_part(part)]
    found = [part for part in parts if type(part).__name__ == asked]
    if len(found) > 1 and hasattr(model, "get_encoder"):
        found = [part for part in found if part is model.get_encoder()] or found
    if len(found) != 1:
        there = ", ".join(dict.fromkeys(type(part).__name__ for part in parts)) or "none"
        raise ImportFailed(
            f"{folder}: --architecture: transformers has no {asked}, and {type(model).__name__} has"
            f" {len(found) or 'no'} parts of that class; its parts are: {there}"
        )
    (part,) = found
    return part


def with_padding(subject: Subject) -> Subject:
    """Let the examples' rows end in padding of different lengths."""

    def examples(batch: int, seed: int) -> Tensors:
        inputs = subject.examples(batch, seed)
        count, length = inputs[MASK].shape
        padding = torch.arange(count) % (length // 2 + 1)
        inputs[MASK] = (torch.arange(length) < (length - padding)[:, None]).to(inputs[MASK].dtype)
        return inputs

    return replace(subject, examples=examples)


def text_parts(folder: Path, *, takes_tokens: bool) -> tuple[bytes | None, str | None, tuple[str, ...]]:
    """Return a folder's tokenizer and pooling, and notes: texts are embedded as sentence-transformers does, or not."""
    tokenizer, pooling, notes = None, None, tuple[str, ...]()
    try:
        pooling = pooling_of(folder)
        if takes_tokens:
            tokenizer, notes = entry_tokenizer(FolderTokenizer.of(folder))
    except ImportFailed as error:
        notes = (f"it has no /v1/embeddings, which would differ from sentence-transformers: {error}",)
    except ModuleNotFoundError as error:
        notes = (f"it takes token ids and no texts: its tokenizer needs the package {error.name}",)
    return tokenizer, pooling, notes


def pooling_of(folder: Path) -> str | None:
    """Return the pooling of token states in a sentence-transformers folder; None if the folder is not one.

    Raises ImportFailed for a pooling, or another module, that `/v1/embeddings` does not have.
    """
    has_modules = (folder / _MODULES).is_file()
    if not has_modules and not (folder / _POOLING / _CONFIG).is_file():
        return None
    try:
        modules = json.loads((folder / _MODULES).read_text(encoding="utf-8")) if has_modules else []
        kinds = {str(module["type"]).rpartition(".")[2]: str(module.get("path", "")) for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ImportFailed(f"{folder / _MODULES} is not a list of modules: {reason_of(error)}") from error
    if others := [kind for kind in kinds if kind not in _SERVED_MODULES]:
        raise ImportFailed(f"its {_MODULES} has {', '.join(others)}, which is not supported")
    path = folder / (kinds.get("Pooling") or _POOLING) / _CONFIG
    written = read_object(path) if path.resolve().is_relative_to(folder.resolve()) and path.is_file() else {}
    modes = written.get("pooling_mode")
    if modes is None:  # as before sentence-transformers 6
        chosen = [key for key, value in written.items() if value is True and key.startswith(_LEGACY_POOLING)]
        modes = [_LEGACY_NAME.sub("", key) for key in chosen] or ["mean"]
    names = [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
    if len(names) != 1 or names[0] not in POOLINGS:
        raise ImportFailed(f"it pools by {', '.join(names)}; supported are {', '.join(POOLINGS)}, one of them")
    return names[0]


def _classes(config: Any, written: dict[str, Any]) -> tuple[str, ...]:
    names = getattr(config, "id2label", None)
    if "id2label" not in written or not isinstance(names, dict):
        return ()
    count = max(names, default=-1) + 1  # at most the limit of `require_possible`
    return tuple(" ".join(str(names.get(index, "")).split()) for index in range(count))


def _notes(written: dict[str, Any], pooling: str | None) -> tuple[str, ...]:
    notes = []
    if pooling is not None:
        notes.append(
            f"outputs are those of the transformer; of modules.json, /v1/embeddings pools ({pooling}) and normalises"
        )
    stored = written.get("dtype") or written.get("torch_dtype")
    if stored in ("float16", "bfloat16"):
        notes.append(
            f"weights are stored as {stored} and computed in float32; the parameter `precision` of config.pbtxt chooses"
        )
    return tuple(notes)

"""Hugging Face models: a directory with config.json and safetensors becomes a module with known inputs."""

import inspect
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.declared_input import DeclaredInput
from cohabit.server.importing.subject import Subject, Tensors, declared, reason_of, with_signature

_CONFIG = "config.json"
_IMAGES, _TOKENS, _MASK = "pixel_values", "input_ids", "attention_mask"
_MOST_KEYS = 3
_DECLARE = "declare every input with --input NAME:TYPE:DIMS"
_TENSOR = re.compile(r"[^\[]*Tensor\b[^\[]*")
_OPTIONAL = re.compile(
    r"(en|de)coder_.*|.*(masks?|masked_pos|labels?|position_ids|positions|token_type_ids|inputs_embeds)|mems|noise"
    r"|cache_position|logits_to_keep"
)
"""Tensor arguments of transformers' models that are for training and generation, or have a usual default."""


class NamedOutputs(nn.Module):
    """A model of transformers that takes the named inputs, and returns its tensors by name and nothing else."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.forward = with_signature(partial(_named_tensors, model), names)


def _named_tensors(model: nn.Module, **inputs: torch.Tensor) -> Tensors:
    outputs = model(**inputs, return_dict=True)
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def is_folder(path: Path) -> bool:
    return (path / _CONFIG).is_file()


def from_folder(folder: Path, inputs: Sequence[DeclaredInput], sequence_length: int | None) -> Subject:
    """Load a model in float32, without code of the folder's own. Raises ImportFailed."""
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
    written = _json(folder / _CONFIG)
    config, model = _load(transformers, folder, written)
    most = _positions(config, model)
    left: list[str] = []
    if not inputs:
        inputs = _inputs(folder, config, model, sequence_length, most)
        left = [name for name in _tensors_of(model) if name not in {given.name for given in inputs}]
    try:
        subject = declared(
            NamedOutputs(model, [given.name for given in inputs]), inputs, 0 if sequence_length else most
        )
    except ImportFailed as error:
        if left:
            raise ImportFailed(f"{error}. It also takes {', '.join(left)}; {_DECLARE}") from error
        raise
    if _MASK in {given.name for given in inputs}:
        subject = _with_padding(subject)
    images = tuple(given.name for given in inputs if given.name == _IMAGES and len(given.dims) == 4)
    notes = [f"the model also takes {', '.join(left)}, which the entry does not; {_DECLARE}"] if left else []
    notes += _notes(folder, written)
    return replace(subject, classes=_classes(config, written), images=images, notes=tuple(notes))


def _load(transformers: Any, folder: Path, written: dict[str, Any]) -> tuple[Any, nn.Module]:
    if written.get("quantization_config"):
        raise ImportFailed(f"{folder}: its weights are quantized, which is not supported; take the original ones")
    names = written.get("architectures") or []
    architecture: Any = getattr(transformers, str(names[0]), None) if names else transformers.AutoModel
    if names and not (inspect.isclass(architecture) and issubclass(architecture, nn.Module)):
        own = "; its own code is never run" if "auto_map" in written else ""
        raise ImportFailed(
            f"{folder}: transformers {transformers.__version__} has no architecture {names[0]}{own}. Write a function"
            " that makes the module, and import it as module:function"
        )
    safe = any(folder.glob("*.safetensors"))
    if not safe and not any(folder.glob("*.bin")):
        raise ImportFailed(f"{folder} has no weights: there is no *.safetensors in it")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.use_cache = False
        model, info = architecture.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=safe,
            weights_only=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:
        what = "" if safe else " (a pickle, of which tensors only are read)"
        raise ImportFailed(f"{folder}{what}: {reason_of(error)}") from error
    if any(name.startswith("decoder_input_") for name in inspect.signature(model.forward).parameters):
        raise ImportFailed(
            f"{folder}: {type(model).__name__} is an encoder with a decoder, which is not supported; its encoder alone"
            " can be imported as module:function, where the function returns model.get_encoder()"
        )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - _MOST_KEYS} more" if len(missing) > _MOST_KEYS else ""
        raise ImportFailed(
            f"{folder}: its weights lack {', '.join(missing[:_MOST_KEYS])}{more} of {architecture.__name__}, and random"
            " ones would answer nonsense; set `architectures` of config.json to the class that was trained"
        )
    return config, model


def _positions(config: Any, model: nn.Module) -> int:
    """Return the largest number of tokens; 0 where there is no limit. RoBERTa's begin after that of padding."""
    most = int(getattr(config, "max_position_embeddings", 0) or 0)
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    padding = [t.padding_idx for t in tables if isinstance(t, nn.Embedding) and t.padding_idx is not None]
    return most - padding[0] - 1 if padding else most


def _inputs(
    folder: Path, config: Any, model: Any, sequence_length: int | None, most: int
) -> tuple[DeclaredInput, ...]:
    """Return the inputs of a text or image model. Raises ImportFailed for others."""
    main = str(model.main_input_name)
    if main == _IMAGES:
        height, width = _image_size(folder, config)
        channels = int(getattr(config, "num_channels", None) or 3)
        return (DeclaredInput(main, "FP32", (-1, channels, height, width)),)
    if main != _TOKENS:
        raise ImportFailed(
            f"{folder}: the sizes of its input {main} are not known; declare it with --input {main}:FP32:-1,DIM,..."
        )
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ImportFailed(
            f"{folder}: the range of its input {main} is not known, because {type(config).__name__} has no vocab_size;"
            f" {_DECLARE} ({', '.join(_tensors_of(model))})"
        )
    if sequence_length is None and not most:
        raise ImportFailed(
            f"{folder}: the model has no largest sequence length, for which memory could be planned; choose a fixed"
            " length, to which clients pad, with --sequence-length N"
        )
    if sequence_length is not None and most and sequence_length > most:
        raise ImportFailed(f"{folder}: --sequence-length is {sequence_length}, the model has {most} positions")
    dims = (-1, -1 if sequence_length is None else sequence_length)
    taken = inspect.signature(model.forward).parameters
    types = int(getattr(config, "type_vocab_size", 0) or 0)
    bounds = {main: int(config.vocab_size), _MASK: 2, **({"token_type_ids": types} if types > 1 else {})}
    return tuple(DeclaredInput(name, "INT64", dims, bound) for name, bound in bounds.items() if name in taken)


def _tensors_of(model: nn.Module) -> list[str]:
    """Return the names of the tensors that a model is given to infer, except for those with a usual default."""
    taken = inspect.signature(model.forward).parameters
    types = {name: get_args(given.annotation) or (given.annotation,) for name, given in taken.items()}
    tensors = [name for name, kinds in types.items() if any(_TENSOR.fullmatch(str(kind)) for kind in kinds)]
    return [name for name in tensors if not _OPTIONAL.fullmatch(name)]


def _image_size(folder: Path, config: Any) -> tuple[int, int]:
    """Return the height and width of images: the model's, or else those that its preprocessor makes."""
    size = getattr(config, "image_size", None)
    if size is None:
        preprocessor = folder / "preprocessor_config.json"
        made = _json(preprocessor) if preprocessor.is_file() else {}
        size = made.get("crop_size") or made.get("size")
    if isinstance(size, dict):
        size = [size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))]
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
    if not isinstance(height, int) or not isinstance(width, int):
        raise ImportFailed(
            f"{folder}: the size of its images is not known; declare it with"
            " --input pixel_values:FP32:-1,3,HEIGHT,WIDTH"
        )
    return height, width


def _with_padding(subject: Subject) -> Subject:
    """Let the examples' rows end in padding, of which each row has another length."""

    def examples(batch: int, seed: int) -> Tensors:
        inputs = subject.examples(batch, seed)
        count, length = inputs[_MASK].shape
        padding = torch.arange(count) % (length // 2 + 1)
        inputs[_MASK] = (torch.arange(length) < (length - padding)[:, None]).to(inputs[_MASK].dtype)
        return inputs

    return replace(subject, examples=examples)


def _classes(config: Any, written: dict[str, Any]) -> tuple[str, ...]:
    names = getattr(config, "id2label", None)
    if "id2label" not in written or not isinstance(names, dict):
        return ()
    return tuple(" ".join(str(names.get(index, "")).split()) for index in range(max(names, default=-1) + 1))


def _notes(folder: Path, written: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    if (folder / "modules.json").is_file():
        notes.append("the folder's pooling and normalisation (modules.json) are not part of the entry")
    stored = written.get("dtype") or written.get("torch_dtype")
    if stored in ("float16", "bfloat16"):
        notes.append(
            f"weights are stored as {stored} and computed in float32; the parameter `precision` of config.pbtxt chooses"
        )
    return tuple(notes)


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ImportFailed(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ImportFailed(f"{path} is not a JSON object")
    return read

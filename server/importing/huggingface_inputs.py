"""Inputs of a transformers model: names, types and sizes, from its folder's configuration."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torch import nn

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.declared_input import DeclaredInput
from cohabit.server.importing.folder_files import read_object

IMAGES, TOKENS, MASK = "pixel_values", "input_ids", "attention_mask"
DECLARE = "declare every input with --input NAME:TYPE:DIMS"
_FEATURES, _WAVES, _SERIES = "input_features", "input_values", "past_values"
_KNOWN = (IMAGES, TOKENS, MASK, _FEATURES, _WAVES, _SERIES)
_TENSOR = re.compile(r"[^\[]*Tensor\b[^\[]*")
_OPTIONAL = re.compile(
    r"(en|de)coder_.*|.*(masks?|masked_pos|labels?|position_ids|positions|token_type_ids|inputs_embeds)|mems|noise"
    r"|cache_position|logits_to_keep|future_.*|is_longer"
)
"""Tensor arguments of transformers' models for training and generation, or with a usual default."""
_DEFAULT_LENGTH = 512
_MOST_LENGTH = 1 << 20
_DEFAULT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of sequences requested by the user: one fixed length, or a maximum."""

    fixed: int | None = None
    most: int | None = None


ANY_LENGTH = Lengths()


@dataclass(frozen=True, slots=True)
class TakenInputs:
    """The inputs of a model. Its dynamic sequence length is at most `most_tokens`; 0 without one."""

    inputs: tuple[DeclaredInput, ...]
    most_tokens: int
    notes: tuple[str, ...]


def inputs_of(folder: Path, config: Any, model: nn.Module, lengths: Lengths) -> TakenInputs:
    """Return a model's inputs for answering in one call. Raises ImportFailed for unknown sizes."""
    main, tensors = str(model.main_input_name), tensors_of(model)
    unknown = [name for name in _without_default(model) if name not in (main, *_KNOWN)]
    if unknown:
        raise ImportFailed(
            f"{folder}: {type(model).__name__} also needs {', '.join(unknown)}, whose sizes are not known; {DECLARE}"
            f" ({', '.join((main, *unknown))})"
        )
    inputs: list[DeclaredInput] = []
    notes: list[str] = []
    most = 0
    for name in dict.fromkeys((main, *tensors)):
        match name:
            case "pixel_values":
                inputs.append(_images(folder, config))
            case "input_ids":
                most, note = most_tokens(folder, config, model, lengths)
                inputs += _texts(folder, config, model, lengths.fixed)
                notes += note
            case "input_features" | "input_values" | "past_values":
                dims, note = _signal(name, folder, config, lengths)
                inputs += [] if dims is None else [DeclaredInput(name, "FP32", (-1, *dims))]
                notes += note
        if name == main and not inputs:
            raise ImportFailed(
                f"{folder}: the sizes of its input {main} are not known; declare it with --input {main}:FP32:-1,DIM,..."
            )
    return TakenInputs(tuple(inputs), most, tuple(notes))


def tensors_of(model: nn.Module) -> list[str]:
    """Return the names of a model's tensor inputs for inference, except those with a usual default."""
    taken = inspect.signature(model.forward).parameters
    types = {name: get_args(given.annotation) or (given.annotation,) for name, given in taken.items()}
    tensors = [name for name, kinds in types.items() if any(_TENSOR.fullmatch(str(kind)) for kind in kinds)]
    return [name for name in tensors if not _OPTIONAL.fullmatch(name)]


def _without_default(model: nn.Module) -> list[str]:
    taken = inspect.signature(model.forward).parameters.values()
    named = [given for given in taken if given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY)]
    return [given.name for given in named if given.default is given.empty]


def _setting(config: Any, *names: str) -> Any:
    """Return the first of some settings that a configuration, or one of its parts, has; None without any."""
    for part in (config, *_parts(config)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _parts(config: Any) -> Iterator[Any]:
    """Yield the configurations nested in a configuration: for texts, images, or sounds."""
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None:
            yield part


def _texts(folder: Path, config: Any, model: nn.Module, length: int | None) -> Iterator[DeclaredInput]:
    vocabulary = _setting(config, "vocab_size")
    if not isinstance(vocabulary, int):
        raise ImportFailed(
            f"{folder}: the range of its input {TOKENS} is not known, because {type(config).__name__} has no"
            f" vocab_size; {DECLARE} ({', '.join(tensors_of(model))})"
        )
    dims = (-1, -1 if length is None else length)
    taken = inspect.signature(model.forward).parameters
    types = int(_setting(config, "type_vocab_size") or 0)
    bounds = {TOKENS: vocabulary, MASK: 2, **({"token_type_ids": types} if types > 1 else {})}
    return (DeclaredInput(name, "INT64", dims, bound) for name, bound in bounds.items() if name in taken)


def most_tokens(folder: Path, config: Any, model: nn.Module, lengths: Lengths) -> tuple[int, list[str]]:
    """Return the maximum dynamic number of tokens, 0 if the length is fixed, and notes about it."""
    positions = _positions(config, model)
    for flag, asked in (("--sequence-length", lengths.fixed), ("--max-sequence-length", lengths.most)):
        if asked is not None and positions and asked > positions:
            raise ImportFailed(f"{folder}: {flag} is {asked}, the model has {positions} positions")
    if lengths.fixed is not None:
        return 0, []
    if lengths.most is not None or positions:
        return lengths.most or positions, []
    most, source = _tokenizers_length(folder)
    return most, [
        f"the model has no largest sequence length; {most} tokens are the most, {source}, and"
        " --max-sequence-length chooses otherwise"
    ]


def _tokenizers_length(folder: Path) -> tuple[int, str]:
    """Return the maximum length of a folder's tokenizer, or else a usual one, and its source."""
    tokenizer = folder / "tokenizer_config.json"
    length = read_object(tokenizer).get("model_max_length") if tokenizer.is_file() else None
    if isinstance(length, int) and 0 < length <= _MOST_LENGTH:  # tokenizers without a limit say 10**30
        return length, "as of its tokenizer"
    return _DEFAULT_LENGTH, "because nothing in the folder says more"


def _positions(config: Any, model: nn.Module) -> int:
    """Return the maximum number of tokens; 0 without a limit. RoBERTa's positions begin after that of padding."""
    most = int(_setting(config, "max_position_embeddings", "n_positions") or 0)
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    padding = [t.padding_idx for t in tables if isinstance(t, nn.Embedding) and t.padding_idx is not None]
    return most - padding[0] - 1 if padding else most


def _images(folder: Path, config: Any) -> DeclaredInput:
    height, width = _image_size(folder, config)
    channels = int(_setting(config, "num_channels") or 3)
    return DeclaredInput(IMAGES, "FP32", (-1, channels, height, width))


def _image_size(folder: Path, config: Any) -> tuple[int, int]:
    """Return the height and width of images: the model's, or else its preprocessor's."""
    size = _setting(config, "image_size")
    if size is None:
        made = _preprocessor(folder)
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


def _signal(name: str, folder: Path, config: Any, lengths: Lengths) -> tuple[tuple[int, ...] | None, list[str]]:
    """Return the sizes of one row of a spectrogram, waveform or time series, and notes; None if unknown."""
    mels = _setting(config, "num_mel_bins")
    if name == _SERIES:
        context, channels = _setting(config, "context_length"), _setting(config, "num_input_channels")
        return ((context, channels) if context and channels else None), []
    if name == _FEATURES and mels and (frames := _setting(config, "max_source_positions")):
        return (mels, 2 * frames), []  # the encoder's second convolution halves the frames
    if name == _FEATURES and mels and (square := _setting(config, "spec_size")):
        made = _preprocessor(folder)
        samples, hop = made.get("nb_max_samples"), made.get("hop_length")
        # The spectrogram is folded into a square; the model stretches shorter ones to fit.
        frames = samples // hop + 1 if samples and hop else square * (square // mels)
        channels = 4 if _setting(config, "enable_fusion") else 1
        return (channels, frames, mels), []
    if name == _WAVES and mels and (frames := _setting(config, "max_length")):
        return (frames, mels), []
    if name == _WAVES and _setting(config, "conv_stride"):
        if lengths.fixed is not None:
            return (lengths.fixed,), []
        rate = int(_preprocessor(folder).get("sampling_rate") or 16000)
        samples = _DEFAULT_SECONDS * rate
        note = (
            f"waveforms have {samples} samples, which are {_DEFAULT_SECONDS} s at {rate} Hz; clients pad to that, and"
            " --sequence-length chooses otherwise"
        )
        return (samples,), [note]
    return None, []


def _preprocessor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    return read_object(path) if path.is_file() else {}

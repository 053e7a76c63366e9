"""Checkpoints of a training loop: one `safetensors` file with all state that the next step depends on.

A checkpoint holds the model's parameters and buffers, the optimizer's state and settings, and the random states of
torch, numpy and Python. It is streamed tensor by tensor, which takes the memory of one, and committed atomically. Its
checksum covers the whole file, including the header.
"""

import json
import os
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cohabit.planner.cache_file import unfinished
from cohabit.planner.errors import FormatError

_FORMAT: Final = "2"
_TENSOR: Final = "$tensor"
"""Key of a reference to one of the file's tensors, in the state stored as JSON."""
_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NO_CHECKSUM: Final = "0" * 8


def write_checkpoint(path: Path, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint to a file beside `path`, then rename it to `path`. Raises OSError, and ValueError for state
    that is neither tensors nor plain values."""
    tensors: dict[str, torch.Tensor] = {}
    about = {
        "format": _FORMAT,
        "steps": str(steps),
        "state": json.dumps(
            {
                "model": _stored(dict(model.state_dict()), "model", tensors),
                "optimizer": _stored(optimizer.state_dict(), "optimizer", tensors),
                "random": _stored(_random_state(), "random", tensors),
            }
        ),
    }
    # The header precedes the data, so offsets are computed from sizes first.
    fields: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        fields[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    beside = unfinished(path)
    try:
        with beside.open("wb") as file:
            checksum = zlib.crc32(_write_header(file, fields, about, _NO_CHECKSUM))
            for tensor in tensors.values():
                data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(data)
                checksum = zlib.crc32(data, checksum)
            file.seek(0)  # the checksum is known only now; it has the length of its placeholder
            _write_header(file, fields, about, f"{checksum:08x}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # so that the rename survives a power failure
    os.close(folder)


def read_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint into a model and an optimizer, and set the random states. Returns the number of steps.

    Raises FormatError for a damaged file, and for a checkpoint of another model or optimizer; then nothing changes.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise FormatError(f"{path}: not a checkpoint of this version of `cohabit train`")
            if about.get("checksum") != _checksum(path, about.get("checksum", "")):
                raise FormatError(f"{path}: the checkpoint is damaged: its checksum is another")
            state = json.loads(about["state"], object_hook=lambda d: _loaded(d, file))
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise FormatError(f"{path}: no checkpoint can be read: {error}") from error
    expected, found = dict(model.state_dict()), state["model"]
    for name in sorted(expected.keys() ^ found.keys()):
        raise FormatError(f"{path}: {name} is in the {'model' if name in expected else 'checkpoint'} only")
    for name, tensor in expected.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            raise FormatError(
                f"{path}: {name} is {found[name].dtype} {list(found[name].shape)}, the model has {tensor.dtype}"
                f" {list(tensor.shape)}"
            )
    optimizer_state = state["optimizer"]
    optimizer_state["state"] = {int(n): values for n, values in optimizer_state["state"].items()}
    try:
        optimizer.load_state_dict(optimizer_state)
    except ValueError as error:
        raise FormatError(f"{path}: the optimizer is another: {error}") from error
    model.load_state_dict(found)
    _set_random_state(state["random"])
    return int(about["steps"])


def _stored(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a JSON-compatible value, with tensors added to `tensors` and replaced by references."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in _DTYPES or value.layout is not torch.strided:
            raise ValueError(f"{name} is a {value.layout} tensor of {value.dtype}, which a checkpoint cannot have")
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(key): _stored(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(item, f"{name}.{n}", tensors) for n, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name} is a {type(value).__name__}, which a checkpoint cannot have")


def _loaded(value: dict[str, Any], file: Any) -> Any:
    return file.get_tensor(value[_TENSOR]) if value.keys() == {_TENSOR} else value


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _write_header(file: BinaryIO, fields: Mapping[str, Any], about: Mapping[str, str], checksum: str) -> bytes:
    header = json.dumps({"__metadata__": {**about, "checksum": checksum}, **fields}).encode()
    header += b" " * (-len(header) % 8)
    written = len(header).to_bytes(8, "little") + header
    file.write(written)
    return written


def _checksum(path: Path, found: str) -> str:
    """Return the checksum of a file, computed with a zero checksum in the header in place of `found`."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        field = f'"checksum": "{found}"'.encode()
        if header.count(field) != 1:
            return ""
        checksum = zlib.crc32(length + header.replace(field, f'"checksum": "{_NO_CHECKSUM}"'.encode()))
        for data in _pieces(file):
            checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while data := file.read(1 << 20):
        yield data

"""Checkpoints: all state of a training in one `safetensors` file, written whole or not at all.

The file is written tensor by tensor, which the library cannot, so that a checkpoint takes the memory of one tensor. Its
metadata have a CRC-32 of the data, the number of steps, and whose state it is.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError, safe_open

from benchmarks.captured.state import RNG, StateTensor, TrainingState
from cohabit.planner.cache_file import unfinished
from cohabit.planner.errors import FormatError
from cohabit.runtime.memory import SpillBuffer
from cohabit.runtime.stores.spill_buffers import bytes_of

GENERATOR: Final = "torch.random"
"""Name of the state of torch's generator, from which random ops take their numbers."""
_DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_NO_CHECKSUM: Final = "0" * 8


def write_checkpoint(
    path: Path, steps: int, state: TrainingState, buffers: Mapping[str, SpillBuffer], generator: torch.Tensor
) -> None:
    """Write all state to a file beside `path`, then give it that name. No copy may be in progress. Raises OSError.

    `generator` is the state of the one that random ops take their numbers from.
    """
    tensors = {name: tensor for name, tensor in state.tensors.items() if name != RNG}
    fields: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, nbytes) in {
        **{name: (t.dtype, t.shape, t.nbytes) for name, t in tensors.items()},
        GENERATOR: (generator.dtype, generator.shape, generator.nbytes),
    }.items():
        fields[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    beside = unfinished(path)
    try:
        with beside.open("wb") as file:
            _write_header(file, fields, steps, _NO_CHECKSUM)
            checksum = 0
            for name, tensor in tensors.items():
                with _here(tensor, buffers[name]):
                    checksum = _write(file, tensor.value(), checksum)
            checksum = _write(file, generator, checksum)
            file.seek(0)
            _write_header(file, fields, steps, f"{checksum:08x}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # so that the name survives a loss of power, too
    os.close(folder)


def read_checkpoint(
    path: Path, state: TrainingState, buffers: Mapping[str, SpillBuffer], generator: torch.Tensor
) -> tuple[int, torch.Tensor]:
    """Fill the buffers of a state that has left memory; return the number of steps and the generator's state.

    `generator` is such a state of this device. Raises FormatError.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if "steps" not in about or about.get("checksum") != _checksum(path):
                raise FormatError(f"{path}: the checkpoint is damaged: its checksum is another")
            expected = {name for name in state.tensors if name != RNG} | {GENERATOR}
            for name in sorted(expected ^ set(file.keys())):
                raise FormatError(f"{path}: {name} is in the {'step' if name in expected else 'checkpoint'} only")
            random: torch.Tensor = file.get_tensor(GENERATOR)
            if random.shape != generator.shape:
                raise FormatError(
                    f"{path}: {GENERATOR} has {random.nbytes} bytes, the device's generator {generator.nbytes}: go on"
                    " with the kind of device that the checkpoint is from"
                )
            for name, tensor in state.tensors.items():
                if name != RNG:
                    found = file.get_tensor(name)
                    if found.shape != tensor.shape or found.dtype != tensor.dtype:
                        raise FormatError(
                            f"{path}: {name} is {found.dtype} {list(found.shape)},"
                            f" the step has {tensor.dtype} {list(tensor.shape)}"
                        )
                    tensor.fill(found, buffers[name])
            return int(about["steps"]), random
    except (OSError, SafetensorError) as error:
        raise FormatError(f"{path}: no checkpoint can be read: {error}") from error


def _write_header(file: BinaryIO, fields: Mapping[str, Any], steps: int, checksum: str) -> None:
    about = {"format": "pt", "steps": str(steps), "checksum": checksum}
    header = json.dumps({"__metadata__": about, **fields}).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)


def _write(file: BinaryIO, tensor: torch.Tensor, checksum: int) -> int:
    """Write a tensor's elements in the order of its dimensions; return the checksum with them."""
    dense = tensor.detach().cpu().contiguous()
    data = bytes_of(dense.view(-1)).data
    file.write(data)
    return zlib.crc32(data, checksum)


@contextmanager
def _here(tensor: StateTensor, buffer: SpillBuffer) -> Iterator[None]:
    """Have a tensor in memory for a while."""
    was_here = tensor.is_here
    if not was_here:
        tensor.load(buffer)
    yield
    if not was_here:
        tensor.storage.resize_(0)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(8), "little") + 8)
        checksum = 0
        while data := file.read(1 << 20):
            checksum = zlib.crc32(data, checksum)
    return f"{checksum:08x}"

"""Kinds of model files, told from their first bytes. Importing this module does not import torch."""

import json
import zipfile
from contextlib import suppress
from pathlib import Path

from cohabit.server.errors import ConfigError, ImportFailed

_WRITE_A_FUNCTION = "write a function that makes the module in PyTorch, and import it as MODULE:FUNCTION"
_MAGIC = {
    (
        0,
        b"GGUF",
    ): f"a GGUF file; import the Hugging Face folder that it was made from, or {_WRITE_A_FUNCTION}",
    (0, b"\x89HDF"): f"an HDF5 file, as Keras writes; {_WRITE_A_FUNCTION}",
    (4, b"TFL3"): f"a TensorFlow Lite file; {_WRITE_A_FUNCTION}",
}
"""Foreign formats by offset and bytes."""
_ONNX_PLACES = ("model.onnx", "onnx/model.onnx")
"""Where a folder has its ONNX file."""
ADAPTER_CONFIG = "adapter_config.json"
"""Configuration of an adapter in peft's format."""
_HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, as its library has it."""


def onnx_file(path: Path) -> Path | None:
    """Return the ONNX file that a path is, or that a folder without weights for PyTorch has; None without one."""
    if path.suffix == ".onnx" and path.is_file():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    return next((path / place for place in _ONNX_PLACES if (path / place).is_file()), None)


def is_model_folder(path: Path) -> bool:
    """Whether a folder is a Hugging Face model's or an adapter's, or has an ONNX file."""
    return any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)) or onnx_file(path) is not None


def require_checkpoint(path: Path) -> None:
    """Raise ConfigError for a file of another kind than a checkpoint, ImportFailed for a safetensors file cut short."""
    with path.open("rb") as file:
        start = file.read(16)
    for (offset, magic), kind in _MAGIC.items():
        if start[offset:].startswith(magic):
            raise ConfigError(f"{path} is {kind}")
    if path.suffix == ".onnx":
        raise ConfigError(f"{path} is an ONNX file, which has a graph of its own; import it without --factory")
    with suppress(OSError, zipfile.BadZipFile):
        names = zipfile.ZipFile(path).namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise ConfigError(f"{path} is a TorchScript file, which is not supported; {_WRITE_A_FUNCTION}")
        if any(name.endswith("models/model.json") for name in names):
            raise ConfigError(
                f"{path} is exported already; serve it as it is, as NAME/1/model.pt2 of a repository, and check it"
                f" with: cohabit check {path}"
            )
    if path.suffix == ".safetensors":
        require_whole(path)


def require_whole(path: Path) -> None:
    """Raise ImportFailed if a safetensors file is shorter than its header says."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _HEADER_BYTES:
            raise ImportFailed(f"{path} is not a safetensors file: its first bytes say that its header is too long")
        header = file.read(header_bytes)
    whole = 8 + header_bytes
    if len(header) == header_bytes:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            offsets = [own["data_offsets"][1] for name, own in json.loads(header).items() if name != "__metadata__"]
            whole += max(offsets, default=0)
    if nbytes < whole:
        raise ImportFailed(
            f"{path} is cut short: it has {nbytes} bytes, and its header says at least {whole}; copy or download it"
            " again"
        )

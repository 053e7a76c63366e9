"""KServe's datatypes, with their numpy dtypes and their names in Triton's ModelConfig."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

_LITTLE_ENDIAN = {
    "BOOL": "?",
    **{f"UINT{8 * nbytes}": f"<u{nbytes}" for nbytes in (1, 2, 4, 8)},
    **{f"INT{8 * nbytes}": f"<i{nbytes}" for nbytes in (1, 2, 4, 8)},
    **{f"FP{8 * nbytes}": f"<f{nbytes}" for nbytes in (2, 4, 8)},
    "BF16": "<u2",
}

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({name: np.dtype(s) for name, s in _LITTLE_ENDIAN.items()})
"""Every datatype of model tensors. numpy has no bfloat16, so its bits are uint16."""

BF16 = "BF16"

BINARY_ONLY = frozenset({"FP16", BF16})
"""Datatypes without an agreed JSON form, which are sent as bytes."""

BYTES = "BYTES"
"""KServe's strings: arrays of `bytes` objects. Inputs of tokenizers, and classifications; PyTorch has none."""


def float32_of_bf16(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Widen bfloat16 bits, which are the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_of_float32(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round finite numbers to the nearest bfloat16, ties to even; returns its bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def config_type(datatype: str) -> str:
    """Return ModelConfig's name for a datatype, such as TYPE_FP32."""
    return f"TYPE_{datatype}"

"""Reads a model's kernel options from its ModelConfig, and refuses options that the device does not support."""

import torch

from cohabit.runtime.lowering import packing
from cohabit.runtime.options import Dtype, Options
from cohabit.server.errors import RepositoryError
from cohabit.server.repository.sources import ModelSource
from cohabit.server.triton.config_fields import parameter_of
from cohabit.server.triton.model_config import ModelConfig

PRECISION, CHANNELS_LAST, FUSED = "precision", "channels_last", "fused"
"""Keys of `parameters` in a ModelConfig, for settings that have no field."""

_DTYPES: dict[str, Dtype] = {
    "float32": "float32",
    "tf32": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
_TRUTHS = {"true": True, "false": False}


def options_of(source: ModelSource, device: str, *, pack_weights: bool = True) -> Options:
    """Return a model's options on a device. Raises RepositoryError naming the parameter."""
    packed = pack_weights and device == "cpu" and packing.unavailable() is None
    if source.config is None:
        return Options(packed=packed)
    precision = _choice(source.config, PRECISION, "float32", tuple(_DTYPES))
    if precision == "tf32" and not device.startswith("cuda"):
        raise RepositoryError(
            f"config.pbtxt: parameter '{PRECISION}': tf32 is how CUDA rounds float32; on {device} it changes nothing"
        )
    dtype = _DTYPES[precision]
    if packed and not packing.supports(getattr(torch, dtype)):
        raise RepositoryError(
            f"config.pbtxt: parameter '{PRECISION}': this CPU ({packing.processor('model name')}) has no instructions"
            f" for {dtype}, which would take longer than float32; leave it out, or use another CPU"
        )
    layout = _choice(source.config, CHANNELS_LAST, "false", tuple(_TRUTHS))
    fused = _TRUTHS[_choice(source.config, FUSED, "false", tuple(_TRUTHS))]
    if fused and not device.startswith("cuda"):
        raise RepositoryError(
            f"config.pbtxt: parameter '{FUSED}': fused kernels are cuDNN's; on {device} there are none"
        )
    return Options(dtype, _TRUTHS[layout], tf32=precision == "tf32", packed=packed, fused=fused)


def _choice(config: ModelConfig, key: str, default: str, choices: tuple[str, ...]) -> str:
    """Return the parameter's value in lower case, or the default."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"'{text[:40]}' is none of {', '.join(choices)}")
        return text.lower()

    return parameter_of(config, key, parse) or default

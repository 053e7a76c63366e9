"""Reads a model's kernel options from its ModelConfig, and refuses options that the device does not support."""

from dataclasses import replace
from typing import cast

import torch

from cohabit.runtime.lowering import packing
from cohabit.runtime.options import CUDA_DEFAULTS, STORED_AS, Dtype, Options, Tf32, Weights
from cohabit.server.errors import RepositoryError
from cohabit.server.repository.sources import ModelSource
from cohabit.server.triton.config_fields import parameter_of
from cohabit.server.triton.model_config import ModelConfig

PRECISION, CHANNELS_LAST, FUSED, WEIGHTS = "precision", "channels_last", "fused", "weights"
"""Keys of `parameters` in a ModelConfig, for settings that have no field."""

_PRECISIONS: dict[str, tuple[Dtype, Tf32]] = {
    "float32": ("float32", "none"),
    "tf32": ("float32", "all"),
    "float16": ("float16", "cudnn"),
    "half": ("float16", "cudnn"),
    "bfloat16": ("bfloat16", "cudnn"),
}
_TRUTHS = {"true": True, "false": False}


def options_of(
    source: ModelSource, device: str, *, pack_weights: bool = True, weights: Weights = "float32"
) -> Options:
    """Return a model's options on a device. Raises RepositoryError naming the parameter.

    `weights` is the default storage format of weights. A reduced precision ignores it.
    """
    is_cuda = device.startswith("cuda")
    packed = pack_weights and device == "cpu" and packing.unavailable() is None
    options = replace(CUDA_DEFAULTS, weights=weights) if is_cuda else Options(packed=packed, weights=weights)
    if source.config is None:
        return options
    # Precision first: weights of a reduced precision have no further encoding.
    precision = _choice(source.config, PRECISION, tuple(_PRECISIONS))
    if precision == "tf32" and not is_cuda:
        raise RepositoryError(
            f"config.pbtxt: parameter '{PRECISION}': tf32 is how CUDA rounds float32; on {device} it changes nothing"
        )
    if precision is not None:
        dtype, tf32 = _PRECISIONS[precision]
        if packed and not packing.supports(getattr(torch, dtype)):
            raise RepositoryError(
                f"config.pbtxt: parameter '{PRECISION}': this CPU ({packing.processor('model name')}) has no"
                f" instructions for {dtype}, which would take longer than float32; leave it out, or use another CPU"
            )
        options = replace(options, dtype=dtype, tf32=tf32 if is_cuda else "none")
    stored = cast(Weights | None, _choice(source.config, WEIGHTS, STORED_AS))
    if options.dtype != "float32":
        if stored not in (None, "float32"):
            raise RepositoryError(
                f"config.pbtxt: parameter '{WEIGHTS}': {stored} is for weights of float32, and '{PRECISION}' makes them"
                f" {options.dtype}; leave out one of the two"
            )
        stored = "float32"
    # These two choose kernels only.
    layout, fused = (_choice(source.config, key, tuple(_TRUTHS)) for key in (CHANNELS_LAST, FUSED))
    if fused == "true" and not is_cuda:
        raise RepositoryError(
            f"config.pbtxt: parameter '{FUSED}': fused kernels are cuDNN's; on {device} there are none"
        )
    return replace(
        options,
        channels_last=options.channels_last if layout is None else _TRUTHS[layout],
        fused=options.fused if fused is None else _TRUTHS[fused],
        weights=stored or weights,
    )


def _choice(config: ModelConfig, key: str, choices: tuple[str, ...]) -> str | None:
    """Return the parameter's value in lower case; None if it is not given."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"'{text[:40]}' is none of {', '.join(choices)}")
        return text.lower()

    return parameter_of(config, key, parse)

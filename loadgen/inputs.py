"""Random valid inputs of a model, from its KServe metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.http import InferInput
from tritonclient.utils import triton_to_np_dtype

from cohabit.loadgen.errors import ModelRefused

MAX_ID = 100
"""Integers are drawn below this, so that they are ids in any vocabulary, and within the range that a server tells."""

FREE_DIMENSION = 16
"""Size of dimensions other than the batch that the model leaves open."""


def random_inputs(metadata: Mapping[str, Any], batch: int, rng: np.random.Generator) -> list[InferInput]:
    """Make the inputs of one request from the server's answer to GET /v2/models/NAME."""
    return [_random_input(metadata["name"], spec, batch, rng) for spec in metadata["inputs"]]


def _random_input(model: str, spec: Mapping[str, Any], batch: int, rng: np.random.Generator) -> InferInput:
    shape = concrete_shape(model, [int(extent) for extent in spec["shape"]], batch)
    values = random_values(spec["name"], spec["datatype"], shape, rng, _bound(spec.get("parameters") or {}))
    if values is None:
        raise ModelRefused(
            f"{model}: input {spec['name']} has the datatype {spec['datatype']}, which loadgen does not know"
        )
    tensor = InferInput(spec["name"], list(shape), spec["datatype"])
    tensor.set_data_from_numpy(values, binary_data=True)
    return tensor


def concrete_shape(model: str, shape: Sequence[int], batch: int) -> tuple[int, ...]:
    """Fill in the open dimensions (-1 in KServe's metadata), of which the first is the batch."""
    if shape and shape[0] not in (-1, batch):
        raise ModelRefused(f"{model}: its inputs have the fixed shape {list(shape)}; use --batch {shape[0]}")
    return tuple(
        batch if axis == 0 else FREE_DIMENSION if extent == -1 else extent for axis, extent in enumerate(shape)
    )


def _bound(parameters: Mapping[str, Any]) -> int:
    """Return what integers are drawn below, given the `parameters` of a Cohabit server's metadata."""
    return min(MAX_ID, int(parameters.get("maximum", MAX_ID)) + 1)


def random_values(
    name: str, datatype: str, shape: tuple[int, ...], rng: np.random.Generator, bound: int = MAX_ID
) -> NDArray[Any] | None:
    """Draw values of a KServe datatype, integers below `bound`; None for an unknown one. Masks are all ones."""
    dtype = triton_to_np_dtype(datatype)
    if dtype is None:
        return None
    if datatype == "BYTES":
        return np.full(shape, b"text", dtype=np.object_)
    if "mask" in name.lower():
        return np.ones(shape, dtype=dtype)
    if datatype.startswith("FP") or datatype == "BF16":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2 if datatype == "BOOL" else bound, shape).astype(dtype)

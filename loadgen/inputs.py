"""Inputs of requests: drawn from a model's KServe metadata, or read from files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.http import InferInput
from tritonclient.utils import triton_to_np_dtype

from cohabit.loadgen.errors import ModelRefused, UsageError

MAX_ID = 100
"""Upper bound (exclusive) of drawn integers, so that they are ids in any vocabulary. A server's range may lower it."""

FREE_DIMENSION = 16
"""Size of a model's open dimensions other than the batch."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    name: str
    datatype: str
    """KServe's datatype, such as FP32."""
    values: NDArray[Any]


@dataclass(frozen=True, slots=True)
class RequestInputs:
    """The inputs of one request, and its expected outputs, as far as a file has them."""

    inputs: tuple[InputTensor, ...]
    expected: Mapping[str, NDArray[Any]]


def random_inputs(metadata: Mapping[str, Any], batch: int, rng: np.random.Generator) -> list[InferInput]:
    """Draw the inputs of one HTTP request from the server's answer to GET /v2/models/NAME."""
    made = []
    for tensor in random_tensors(metadata, batch, rng):
        made.append(InferInput(tensor.name, list(tensor.values.shape), tensor.datatype))
        made[-1].set_data_from_numpy(tensor.values, binary_data=True)
    return made


def random_tensors(metadata: Mapping[str, Any], batch: int, rng: np.random.Generator) -> tuple[InputTensor, ...]:
    """Draw the inputs of one request from a model's metadata."""
    return tuple(_random_tensor(metadata["name"], spec, batch, rng) for spec in metadata["inputs"])


def _random_tensor(model: str, spec: Mapping[str, Any], batch: int, rng: np.random.Generator) -> InputTensor:
    shape = concrete_shape(model, [int(extent) for extent in spec["shape"]], batch)
    values = random_values(spec["name"], spec["datatype"], shape, rng, id_bound(spec.get("parameters") or {}))
    if values is None:
        raise ModelRefused(
            f"{model}: input {spec['name']} has the datatype {spec['datatype']}, which loadgen does not know"
        )
    return InputTensor(spec["name"], spec["datatype"], values)


def concrete_shape(model: str, shape: Sequence[int], batch: int) -> tuple[int, ...]:
    """Replace open dimensions (-1 in KServe's metadata) with sizes; the first dimension is the batch."""
    if shape and shape[0] not in (-1, batch):
        raise ModelRefused(f"{model}: its inputs have the fixed shape {list(shape)}; use --batch {shape[0]}")
    return tuple(
        batch if axis == 0 else FREE_DIMENSION if extent == -1 else extent for axis, extent in enumerate(shape)
    )


def id_bound(parameters: Mapping[str, Any]) -> int:
    """Return the exclusive upper bound of drawn integers, from the `parameters` of a Cohabit server's metadata."""
    return min(MAX_ID, int(parameters.get("maximum", MAX_ID)) + 1)


def random_values(
    name: str, datatype: str, shape: tuple[int, ...], rng: np.random.Generator, bound: int = MAX_ID
) -> NDArray[Any] | None:
    """Draw values of a KServe datatype, integers below `bound`. Masks are all ones. None for an unknown datatype."""
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


def file_of(inputs: Path, model: str) -> Path | None:
    """Return the file with a model's inputs.

    In a folder, such as a model repository, that is MODEL.npz, MODEL.jsonl or MODEL/sample.json; None if it has none.
    """
    if not inputs.is_dir():
        return inputs
    candidates = (inputs / f"{model}.npz", inputs / f"{model}.jsonl", inputs / model / "sample.json")
    return next((path for path in candidates if path.is_file()), None)


def read_requests(path: Path, metadata: Mapping[str, Any], batches: Sequence[int]) -> list[RequestInputs]:
    """Read a model's requests: from a `.npz`, one per size in `batches`; from a JSON file, all.

    A `.npz` has an array of rows for each input, and optionally for outputs, which answers must then equal. JSON lines
    are bodies of inference requests; lines whose `model` is another one are skipped. Raises UsageError for a file that
    does not match the model.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _rows(path, metadata, dict(arrays), batches)
        bodies = path.read_text(encoding="utf-8")
        lines = [bodies] if path.suffix == ".json" else [line for line in bodies.splitlines() if line.strip()]
        given = [_from_json(body) for line in lines if _is_for(body := json.loads(line), metadata["name"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--inputs {path}: {metadata['name']}: {type(error).__name__}: {error}") from error
    if not given:
        raise UsageError(f"--inputs {path}: it has no request of model {metadata['name']}")
    return given


def _rows(
    path: Path, metadata: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], batches: Sequence[int]
) -> list[RequestInputs]:
    """Take consecutive rows for each batch, wrapping around after the last row."""
    model = metadata["name"]
    if missing := [spec["name"] for spec in metadata["inputs"] if spec["name"] not in arrays]:
        raise UsageError(
            f"--inputs {path}: no array {', '.join(missing)}, an input of {model}; it has {', '.join(arrays)}"
        )
    specs = {spec["name"]: spec["datatype"] for spec in metadata["inputs"]}
    outputs = [spec["name"] for spec in metadata["outputs"] if spec["name"] in arrays]
    counts = {len(arrays[name]) if arrays[name].ndim else 0 for name in (*specs, *outputs)}
    if len(counts) != 1 or 0 in counts:
        raise UsageError(f"--inputs {path}: its arrays of {model} have {sorted(counts)} rows; give as many of each")
    count, first, requests = counts.pop(), 0, []
    for batch in batches:
        chosen = np.arange(first, first + batch) % count
        first += batch
        tensors = []
        for name, datatype in specs.items():
            dtype = triton_to_np_dtype(datatype)
            if dtype is None:
                raise ModelRefused(
                    f"{model}: input {name} has the datatype {datatype}, which loadgen does not know"
                )
            tensors.append(InputTensor(name, datatype, arrays[name][chosen].astype(dtype)))
        requests.append(RequestInputs(tuple(tensors), {name: arrays[name][chosen] for name in outputs}))
    return requests


def _is_for(body: Mapping[str, Any], model: str) -> bool:
    return bool(body.get("model", model) == model)


def _from_json(body: Mapping[str, Any]) -> RequestInputs:
    tensors = []
    for tensor in body["inputs"]:
        values = np.array(tensor["data"], dtype=triton_to_np_dtype(tensor["datatype"])).reshape(tensor["shape"])
        if tensor["datatype"] == "BYTES":
            texts = [str(text).encode() for text in values.flat]
            values = np.array(texts, dtype=np.object_).reshape(values.shape)
        tensors.append(InputTensor(tensor["name"], tensor["datatype"], values))
    return RequestInputs(tuple(tensors), {})

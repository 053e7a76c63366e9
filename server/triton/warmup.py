"""Requests made from the samples in a configuration's `model_warmup`."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cohabit.server.errors import InvalidRequest
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Parameters, Request
from cohabit.server.protocol.datatypes import BF16, DTYPES, bf16_of_float32
from cohabit.server.protocol.matching import InputBody, RequestBody, fit
from cohabit.server.protocol.shared_memory import Regions, RegionUse
from cohabit.server.triton.model_config import DataType, ModelWarmup

_SEED = 0


def warmup_request(sample: ModelWarmup, info: ModelInfo, files: Mapping[str, Path]) -> Request:
    """Make a sample's request, with identical rows. `files` has the files of its inputs, by name.

    Raises InvalidRequest if it does not fit the model, or OSError.
    """
    ranks = {tensor.name: len(tensor.shape) for tensor in info.inputs}
    random = np.random.default_rng(_SEED)

    def body(name: str, given: ModelWarmup.Input) -> InputBody[list[int]]:
        dims, datatype = list(given.dims), DataType.Name(given.data_type).removeprefix("TYPE_")
        lacks_batch = info.max_batch_size > 0 and len(dims) == ranks.get(name)
        return InputBody(name, datatype, [sample.batch_size, *dims] if lacks_batch else dims)

    def read(body: InputBody[list[int]]) -> Array:
        given = sample.inputs[body.name]
        count = math.prod(given.dims)
        match given.WhichOneof("input_data_type"):
            case "zero_data":
                row: Array = np.zeros(count, DTYPES[body.datatype])
            case "random_data":
                row = _random(random, count, body.datatype)
            case "input_data_file":
                row = _from_file(files[given.input_data_file], count, body.datatype)
            case _:
                raise InvalidRequest(f"input '{body.name}' has no zero_data, random_data or input_data_file")
        return np.resize(row, body.shape)

    bodies = [body(name, given) for name, given in sorted(sample.inputs.items())]
    sequence: Parameters = {"sequence_id": 1, "sequence_start": True} if info.sequences else {}
    return fit(RequestBody(bodies, parameters=sequence), info, RegionUse(Regions()), read, binary=True)


def _random(random: np.random.Generator, count: int, datatype: str) -> Array:
    """Draw numbers from 0 to 1: integers may be indices, and random bits would include NaNs and denormals."""
    dtype = DTYPES[datatype]
    if datatype == BF16:
        return bf16_of_float32(random.random(count, np.float32))
    return random.random(count).astype(dtype) if dtype.kind == "f" else random.integers(0, 2, count).astype(dtype)


def _from_file(path: Path, count: int, datatype: str) -> Array:
    """Read one row. Raises InvalidRequest for a file that is too short."""
    nbytes = count * DTYPES[datatype].itemsize
    with path.open("rb") as file:
        raw = file.read(nbytes)
    if len(raw) < nbytes:
        raise InvalidRequest(f"file '{path.name}' has {len(raw)} bytes, a row takes {nbytes}")
    return np.frombuffer(raw, DTYPES[datatype])

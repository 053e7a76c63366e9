"""Puts the inputs of several requests together along the batch, and takes their outputs apart again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from server.model import Array, Execution
from server.request import InferRequest


def joined(requests: Sequence[InferRequest]) -> Mapping[str, Array]:
    """The inputs of one or more requests, one behind the other along the batch."""
    if len(requests) == 1:
        return requests[0].inputs
    return {name: np.concatenate([r.inputs[name] for r in requests]) for name in requests[0].inputs}


def parted(requests: Sequence[InferRequest], execution: Execution) -> Iterator[Execution]:
    """Each request's rows of the outputs."""
    if len(requests) == 1:
        yield execution
        return
    start = 0
    for request in requests:
        rows = slice(start, start + request.batch)
        start = rows.stop
        yield replace(execution, outputs={name: array[rows] for name, array in execution.outputs.items()})

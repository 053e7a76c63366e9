"""Takes the outputs of requests that were executed together apart again."""

from collections.abc import Sequence

from msgspec.structs import replace

from server.protocol.model import Execution
from server.protocol.request import InferRequest


def parted(requests: Sequence[InferRequest], execution: Execution) -> list[Execution]:
    """Each request's rows of the outputs."""
    if len(requests) == 1:
        return [execution]
    executions, start = [], 0
    for request in requests:
        end = start + request.batch
        own = {name: array[start:end] for name, array in execution.outputs.items()}
        executions.append(replace(execution, outputs=own))
        start = end
    return executions

"""Warm-up: the executions that `model_warmup` of a configuration asks for, before its model is served."""

import asyncio
from functools import partial

from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.engine.execution import Servable
from cohabit.server.engine.sequences import first_inputs
from cohabit.server.errors import RepositoryError
from cohabit.server.repository.sources import ModelSource
from cohabit.server.scheduling.sequences import SequenceRules
from cohabit.server.triton.warmup import warmup_request

_MOST_EXECUTIONS = 1000
"""Of one model, so that a mistyped count does not keep it from being served."""


async def warm_up(
    lane: ComputeLane, servable: Servable, source: ModelSource, rules: SequenceRules | None = None
) -> None:
    """Execute a model's warm-up samples, between the executions of others. They are not counted.

    Of a model with sequences, each is a sequence of one request.

    Raises RepositoryError for a sample that does not fit the model, or that it cannot take.
    """
    samples = [] if source.config is None else [s for s in source.config.model_warmup if s.batch_size]
    executions = sum(max(sample.count, 1) for sample in samples)
    if executions > _MOST_EXECUTIONS:
        raise RepositoryError(
            f"config.pbtxt: model_warmup asks for {executions} executions, the limit is {_MOST_EXECUTIONS}; lower count"
        )
    files = {name: path for name, (path, _) in source.warmup_files.items()}
    for sample in samples:
        try:
            request = await asyncio.to_thread(warmup_request, sample, servable.info, files)
            inputs = request.inputs if rules is None else first_inputs(rules, request.inputs)
            for _ in range(max(sample.count, 1)):
                await lane.call_on_lane(partial(servable.execute, [inputs], request.batch))
        except Exception as error:
            raise RepositoryError(f"config.pbtxt: model_warmup '{sample.name}': {error}") from error

"""The engine tells the model that comes next, so that its copies begin beside the inference before it."""

import asyncio

import numpy as np
from server_fakes import FakeServable, Gate, identity

from server.engine import Engine
from server.model import Device, Swap
from server.request import InferRequest
from server.scheduler import Scheduler
from server.statistics import ModelStatistics


def request(model: str, batch: int) -> InferRequest:
    return InferRequest(model, 1, {"x": np.zeros((batch, 4), np.float32)}, batch, ())


async def run_three(device: Device | None = None) -> tuple[FakeServable, FakeServable]:
    """A request for `first` waits at a gate until one for `second` and one more for `first` are queued."""
    gate = Gate()
    first, second = FakeServable(identity("first", "FP32").info, gate), identity("second", "FP32")
    engine = Engine(Scheduler(8))
    for servable in (first, second):
        engine.add(servable, ModelStatistics())
    engine.use_device(device)
    engine.start()
    answers = [asyncio.ensure_future(engine.infer(request("first", 1)))]
    await asyncio.to_thread(gate.entered.wait, 10)
    answers += [asyncio.ensure_future(engine.infer(request(m, b))) for m, b in (("second", 3), ("first", 2))]
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(*answers)
    await engine.stop()
    assert (first.calls, second.calls) == ([1, 2], [3])
    return first, second


async def test_the_next_model_hears_of_its_turn_before_the_one_ahead_of_it_runs() -> None:
    first, second = await run_three()
    assert first.expected == [2], "while `second` ran"
    assert second.expected == [], "nothing was known when the first request began"


class OneRegion:
    def prepare(self, model: str) -> Swap:
        return Swap()


async def test_models_that_share_one_region_are_told_nothing() -> None:
    first, second = await run_three(OneRegion())
    assert first.expected == second.expected == []

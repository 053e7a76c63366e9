"""Sequences in the engine: the order and the batches of their requests, their states, and their configuration."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from cohabit.planner.shapes import Bucket
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.errors import InvalidRequest, RepositoryError
from cohabit.server.ipc.model import ModelInfo, ModelKey, TensorSpec
from cohabit.server.ipc.request import Request, RequestedOutput, SequenceStep
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.scheduler import Scheduler
from cohabit.server.triton.config_fields import refuse_fields
from cohabit.server.triton.model_config import ModelConfig
from cohabit.server.triton.sequences import rules_of, with_sequences
from tests.server.server_fakes import FakeServable

KEY = ModelKey("m", 1)
STATE = "state { input_name: 'before' output_name: 'after' }"
WHOLE = ModelInfo(
    "m",
    1,
    inputs=(
        TensorSpec("x", "FP32", (2,)),
        TensorSpec("before", "FP32", (2,)),
        TensorSpec("flag", "INT32", (1,)),
        TensorSpec("wide", "INT64", (1,)),
        TensorSpec("free", "FP32", (-1,)),
    ),
    outputs=(TensorSpec("y", "FP32", (2,)), TensorSpec("after", "FP32", (2,)), TensorSpec("half", "FP16", (2,))),
    max_batch_size=8,
)


def config(text: str) -> ModelConfig:
    return text_format.Parse(f"sequence_batching {{ {text} }}", ModelConfig())


def request(sequence: int, value: float = 1.0, sizes: tuple[int, ...] = (), **flags: bool) -> Request:
    x = np.full((1, 2), value, np.float32)
    return Request(KEY, {"x": x}, 1, (RequestedOutput("y"),), sizes=sizes, sequence=SequenceStep(sequence, **flags))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("keeps_order", [False, True])
def test_batches_keep_the_order_of_each_sequence(seed: int, keeps_order: bool) -> None:
    """Whatever is waited for, cancelled, late or of other sizes: no batch has two requests of one sequence."""
    draws = random.Random(seed)
    scheduler = Scheduler(1000)
    predicted = {Bucket(1): 1.0, Bucket(2): 1.1, Bucket(4): 1.2, Bucket(8): 1.3}
    scheduler.add(KEY, predicted, Policy(keeps_order=keeps_order), max_rows=8)
    submitted, executed, gone, now_s = list[Any](), list[Any](), set[Any](), 0.0
    for _ in range(300):
        now_s += draws.random()
        if draws.random() < 0.7:
            sizes = (draws.choice([16, 32]),) if seed % 2 else ()
            submitted.append(scheduler.submit(now_s, request(draws.randrange(6), sizes=sizes)))
        elif draws.random() < 0.1 and submitted and scheduler.cancel(submitted[-1]):
            gone.add(submitted[-1])
        elif (batch := scheduler.next(now_s)) is not None:
            steps = [ticket.request.sequence.id for ticket in batch.tickets if ticket.request.sequence]
            assert len(set(steps)) == len(steps)
            executed += batch.tickets
            scheduler.finished(batch, now_s, None)
    while (batch := scheduler.next(now_s)) is not None:
        executed += batch.tickets
        scheduler.finished(batch, now_s, None)
    for sequence in range(6):
        expected = [t for t in submitted if t.request.sequence.id == sequence and t not in gone]
        assert [t for t in executed if t.request.sequence.id == sequence] == expected


async def test_a_request_that_fails_leaves_its_sequence_as_it_was() -> None:
    rules = rules_of(config(STATE), WHOLE, {})
    info = with_sequences(WHOLE, rules)
    faulty = [True]

    def add(x: Any, before: Any) -> dict[str, Any]:
        if faulty[0] and (x < 0).any():
            raise InvalidRequest("a value is negative")
        return {"y": before + x, "after": before + x}

    lane = ComputeLane(Scheduler(64))
    lane.add(FakeServable(info, add, predicted_s={Bucket(8): 0.1}), ModelStatistics(), None, rules)
    lane.start()
    try:

        async def ask(sequence: int, value: float, **flags: bool) -> float:
            answer = await lane.infer(request(sequence, value, **flags))
            return float(answer.outputs["y"][0, 0])

        with pytest.raises(InvalidRequest, match="negative"):
            await ask(1, -1.0, start=True)
        with pytest.raises(InvalidRequest, match="must specify the START flag"):
            await ask(1, 1.0)
        assert await ask(1, 1.0, start=True) == 1.0
        with pytest.raises(InvalidRequest, match="negative"):
            await ask(1, -1.0, end=True)
        with pytest.raises(InvalidRequest, match="negative"):
            await ask(1, -1.0, start=True)
        assert await ask(1, 1.0) == 2.0, "neither ended nor begun again"
        faulty[0] = False
        assert await ask(1, -1.0) == 1.0
        sequences = lane.sequences(KEY)
        assert sequences is not None
        assert (sequences.count, dict(sequences._waiting)) == (1, {})
    finally:
        assert await lane.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("state { input_name: 'none' output_name: 'after' }", "the program has no input 'none', but x, before"),
        ("state { input_name: 'before' output_name: 'none' }", "the program has no output 'none', but y, after"),
        ("state { input_name: 'before' output_name: 'half' }", r"is FP32 \[2\], its output 'half' FP16 \[2\]"),
        (
            "state { input_name: 'free' output_name: 'after' }",
            r"input 'free' is \[-1\]; states and controls have fixed",
        ),
        ("state { input_name: 'before' output_name: 'after' data_type: TYPE_FP16 }", "data_type is TYPE_FP16"),
        ("state { input_name: 'before' output_name: 'after' dims: 3 }", r"dims are \[3\], the program's \[2\]"),
        (f"{STATE} {STATE}", "names an input twice"),
        (
            "control_input { name: 'flag' control { fp32_false_true: [0, 1] } }",
            "give its two values as int32_false",
        ),
        (
            "control_input { name: 'wide' control { int32_false_true: [0, 1] } }",
            "of an input that is INT32, FP32 or",
        ),
        ("control_input { name: 'flag' control { int32_false_true: [0] } }", "give its two values"),
        ("control_input { name: 'flag' }", "it has 0 controls"),
        ("control_input { name: 'free' control { kind: CONTROL_SEQUENCE_CORRID } }", "have fixed sizes"),
        ("control_input { name: 'x' control { kind: CONTROL_SEQUENCE_CORRID } }", "an id is an integer"),
    ],
)
def test_a_configuration_that_contradicts_the_program_is_refused(text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=message):
        rules_of(config(text), WHOLE, {})


def test_a_state_s_file_must_have_its_size(tmp_path: Path) -> None:
    text = "state { input_name: 'before' output_name: 'after' initial_state { data_file: 'f' } }"
    np.array([3, 4], np.float32).tofile(tmp_path / "f")
    rules = rules_of(config(text), WHOLE, {"f": tmp_path / "f"})
    assert rules is not None
    assert rules.states[0].initial.tolist() == [[3, 4]]
    (tmp_path / "f").write_bytes(b"123")
    with pytest.raises(RepositoryError, match=r"initial_state/f has 3 bytes, a state of FP32 \[2\] 8"):
        rules_of(config(text), WHOLE, {"f": tmp_path / "f"})


def test_something_must_be_left_for_clients() -> None:
    info = ModelInfo("m", 1, WHOLE.inputs[1:2], WHOLE.outputs[1:2], 8)
    with pytest.raises(RepositoryError, match="leaves no input for clients"):
        with_sequences(info, rules_of(config(STATE), info, {}))


@pytest.mark.parametrize("text", ["iterative_sequence: true", f"{STATE[:-1]} use_growable_memory: true }}"])
def test_other_kinds_of_sequences_are_refused_by_name(text: str) -> None:
    with pytest.raises(RepositoryError, match="is not supported"):
        refuse_fields(config(text))

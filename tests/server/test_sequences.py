"""Sequences in the engine: the order and the batches of their requests, their states, and their configuration."""

import asyncio
import gc
import mmap
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from msgspec.structs import replace

from cohabit.planner.shapes import Bucket, Dimension, DynamicShape
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.engine.sequences import StateMemory
from cohabit.server.engine.slots import StateSlots
from cohabit.server.errors import InvalidRequest, Overloaded, RepositoryError, SequenceLost
from cohabit.server.ipc.model import ModelInfo, ModelKey, TensorSpec
from cohabit.server.ipc.request import Request, RequestedOutput, SequenceStep
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.scheduler import Scheduler
from cohabit.server.triton.config_fields import refuse_fields
from cohabit.server.triton.model_config import ModelConfig
from cohabit.server.triton.sequences import rules_of, with_sequences
from tests.support.server.server_fakes import FakeServable

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


def config(text: str, more: str = "") -> ModelConfig:
    return text_format.Parse(f"sequence_batching {{ {text} }} {more}", ModelConfig())


def request(sequence: int, value: float = 1.0, sizes: tuple[int, ...] = (), **flags: bool) -> Request:
    x = np.full((1, 2), value, np.float32)
    return Request(KEY, {"x": x}, 1, (RequestedOutput("y"),), sizes=sizes, sequence=SequenceStep(sequence, **flags))


class Clock:
    """A clock that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("keeps_order", [False, True])
async def test_a_sequence_continues_from_its_last_answer_that_was_written(seed: int, keeps_order: bool) -> None:
    """Requests of six sequences wait at once; they fail, are cancelled, or their answers cannot be written."""
    draws = random.Random(seed)
    rules = rules_of(config(STATE), WHOLE, {})
    info = with_sequences(WHOLE, rules)

    def add(x: Any, before: Any) -> dict[str, Any]:
        if (x < 0).any():
            raise InvalidRequest("a value is negative")
        return {"y": before + x, "after": before + x}

    lane = ComputeLane(Scheduler(1000))
    predicted = {Bucket(n): 1e-4 * (1 + n / 8) for n in (1, 2, 4, 8)}
    lane.add(
        FakeServable(info, add, predicted_s=predicted),
        ModelStatistics(),
        Policy(keeps_order=keeps_order, batch_delay_s=1e-4),
        rules,
    )
    lane.start()
    state: dict[int, float | None] = dict.fromkeys(range(1, 7))
    try:
        for _ in range(6):
            asked = list[tuple[asyncio.Task[Any], float | type[Exception] | None]]()
            for _ in range(20):
                sequence, value = draws.randrange(1, 7), float(draws.randrange(1, 9))
                start, end, fate = draws.random() < 0.3, draws.random() < 0.1, draws.choice(["kept"] * 4 + FATES)
                one = request(sequence, -1.0 if fate == "fails" else value, start=start, end=end)
                before = 0.0 if start else state[sequence]
                expected: float | type[Exception] | None = None if before is None else before + value
                if fate == "fails" or before is None:
                    expected = InvalidRequest
                elif fate == "kept":
                    state[sequence] = None if end else before + value
                asked.append((asyncio.create_task(outcome(lane, one, fate, draws.randrange(9))), expected))
            for task, expected in asked:
                got = await task
                assert got in ("cancelled", expected)
        sequences = lane.sequences(KEY)
        assert sequences is not None
        known = {key: float(one.states["before"][0, 0]) for key, one in sequences._known.items()}
        assert known == {key: value for key, value in state.items() if value is not None}
        assert sequences.nbytes == sum(one.nbytes for one in sequences._known.values())
        assert not sequences._under_way
        assert not lane._turns._under_way
    finally:
        assert await lane.stop()


FATES = ["fails", "cancelled", "not written"]


async def outcome(lane: ComputeLane, asked: Request, fate: str, steps: int) -> float | type[Exception] | str:
    """Return a request's answer, its error's type, or that it was cancelled after some steps of the event loop."""
    running = asyncio.create_task(lane.infer(asked))
    if fate == "cancelled":
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
    try:
        answer = await running
    except InvalidRequest:
        return InvalidRequest
    except asyncio.CancelledError:
        return "cancelled"
    lane.settle(asked, kept=fate == "kept")
    return float(answer.outputs["y"][0, 0])


async def test_sequences_of_all_models_end_by_the_clock_and_make_room_for_others() -> None:
    """Without any further request of their models; the least recently used first, but none of the last second."""
    clock = Clock()
    each = 2 * 4 + 1024
    memory = StateMemory(4 * each, clock)
    rules = rules_of(config(STATE + " max_sequence_idle_microseconds: 60000000"), WHOLE, {})
    info = with_sequences(WHOLE, rules)
    lane = ComputeLane(Scheduler(64), state_memory=memory)
    for name in ("m", "n"):
        servable = FakeServable(replace(info, name=name), lambda x, before: {"y": x, "after": before + x})
        lane.add(servable, ModelStatistics(), None, rules)
    lane.start()
    try:

        async def ask(name: str, sequence: int, start: bool = True) -> None:
            asked = replace(request(sequence, start=start), model=ModelKey(name, 1), arrived_s=clock.now_s)
            await lane.infer(asked)
            lane.settle(asked, kept=True)

        def known() -> list[tuple[str, int]]:
            loads = {name: lane.sequences(ModelKey(name, 1)) for name in ("m", "n")}
            return [(name, id_) for name, load in loads.items() if load is not None for id_ in load._known]

        for number in range(4):
            await ask("m", number + 1)
        with pytest.raises(Overloaded, match=r"leaves less than the 1.0 KiB"):
            await ask("n", 9)
        assert len(known()) == 4, "all have been used within the last second"
        clock.now_s = 2.0
        await ask("m", 1, start=False)
        await ask("n", 9)
        assert known() == [("m", 3), ("m", 4), ("m", 1), ("n", 9)]
        with pytest.raises(SequenceLost, match=r"earlier if other sequences need its memory \(--queue-memory\)"):
            await ask("m", 2, start=False)
        clock.now_s = 61.0
        memory.forget_idle()
        assert known() == [("m", 1), ("n", 9)]
        clock.now_s = 62.1
        memory.forget_idle()
        assert (known(), memory.used_bytes) == ([], 0)
    finally:
        assert await lane.stop()


def test_a_batch_waits_for_the_sequences_of_the_execution_before() -> None:
    """Up to the queue delay after it, and not at all once they have come, or for a sequence that has ended."""
    scheduler = Scheduler(100)
    scheduler.add(KEY, {Bucket(1): 1.0, Bucket(4): 1.1}, Policy(batch_delay_s=0.5), max_rows=4)

    def executed(now_s: float, *submitted: tuple[int, bool]) -> list[int] | None:
        """Submit requests, with whether they are the last ones, and return the sequences of what is executed next."""
        for sequence, end in submitted:
            scheduler.submit(now_s, request(sequence, end=end))
        if (batch := scheduler.next(now_s)) is None:
            return None
        scheduler.finished(batch, now_s, None)
        return [ticket.request.sequence.id for ticket in batch.tickets if ticket.request.sequence]

    assert executed(0.0, (1, False), (2, False)) == [1, 2], "nothing was executed before"
    assert executed(0.1, (1, False)) is None
    assert scheduler.wake_s(0.1) == 0.5, "half a second after the execution"
    assert executed(0.2, (2, True)) == [1, 2], "all have come"
    assert executed(0.3, (3, False)) is None, "the first goes on"
    assert executed(0.7) == [3], "it has not come in time"
    assert executed(0.8, (4, False)) is None
    assert executed(0.9, (3, True)) == [4, 3]
    assert executed(1.0, (4, True)) == [4]
    assert executed(1.1, (5, False)) == [5], "those before have ended"


def test_a_sequence_that_is_alone_waits_for_nobody() -> None:
    scheduler = Scheduler(100)
    scheduler.add(KEY, {Bucket(1): 1.0, Bucket(4): 1.1}, Policy(batch_delay_s=0.5), max_rows=4)
    for now_s in (0.0, 0.1, 0.2):
        scheduler.submit(now_s, request(1))
        batch = scheduler.next(now_s)
        assert batch is not None
        scheduler.finished(batch, now_s, None)


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
            asked = request(sequence, value, **flags)
            answer = await lane.infer(asked)
            lane.settle(asked, kept=True)
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
        assert (sequences.count, sequences._under_way) == (1, {})
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
            r"is FP32 \[-1\], its output 'after' FP32 \[2\]",
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
        ("control_input { name: 'free' control { kind: CONTROL_SEQUENCE_CORRID } }", "has a fixed size"),
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


GROWING = ModelInfo(
    "m",
    1,
    inputs=(
        TensorSpec("x", "FP32", (-1,), sizes=("t",)),
        TensorSpec("length", "INT64", ()),
        TensorSpec("past", "FP32", (2, -1), sizes=(2, "u")),
    ),
    outputs=(TensorSpec("y", "FP32", (2,)), TensorSpec("new", "FP32", (2, -1), sizes=(2, "t"))),
    max_batch_size=4,
    dynamic=DynamicShape(
        (Dimension("t", 0, 1, 1, 0, 1, 8, (1, 8)), Dimension("u", 2, 2, 1, 0, 1, 40, (16, 40))),
        ("t <= 8", "u + t <= 99"),
    ),
)
GROWS = "state { input_name: 'past' output_name: 'new' }"
LENGTHS = "parameters { key: 'cohabit.lengths' value { string_value: 'length' } }"


def grown(x: Any, length: Any, past: Any) -> dict[str, Any]:
    """Sums and counts each row's valid entries, and those that are new."""
    rows = [
        np.concatenate([row[:, :n], np.stack([own, own])], 1) for row, n, own in zip(past, length, x, strict=True)
    ]
    return {
        "y": np.array([[row[0].sum(), row.shape[1]] for row in rows], np.float32),
        "new": np.stack([np.stack([own, own * 0 + n]) for own, n in zip(x, length, strict=True)]).astype(
            np.float32
        ),
    }


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (GROWS, "", "parameter cohabit.lengths names the input"),
        (STATE, LENGTHS, "parameter cohabit.lengths names the input"),
        (GROWS, LENGTHS.replace("'length'", "'none'"), "the program has no input 'none'"),
        (GROWS, LENGTHS.replace("'length'", "'x'"), "the program's input is FP32; a length is an integer"),
        (
            f"{GROWS[:-1]} initial_state {{ data_file: 'f' }} }}",
            LENGTHS,
            "is empty at first; leave its initial_state",
        ),
    ],
)
def test_what_grows_and_who_is_told_must_agree(text: str, more: str, message: str) -> None:
    info = replace(
        GROWING, inputs=(*GROWING.inputs, *WHOLE.inputs[1:2]), outputs=(*GROWING.outputs, WHOLE.outputs[1])
    )
    with pytest.raises(RepositoryError, match=message):
        rules_of(config(text, more), info, {"f": Path("f")})


async def test_entries_count_by_pages_and_end_for_other_models_sequences() -> None:
    clock = Clock()
    rules = rules_of(config(GROWS, LENGTHS), GROWING, {})
    assert rules is not None
    page, overhead = mmap.PAGESIZE, 1024
    memory = StateMemory(page + 2 * overhead, clock)
    plain = rules_of(config(STATE + " max_sequence_idle_microseconds: 60000000"), WHOLE, {})
    lane = ComputeLane(Scheduler(64), state_memory=memory)
    lane.add(FakeServable(with_sequences(GROWING, rules), grown), ModelStatistics(), None, rules)
    other = replace(with_sequences(WHOLE, plain), name="n")
    lane.add(FakeServable(other, lambda x, before: {"y": x, "after": before + x}), ModelStatistics(), None, plain)
    lane.start()
    try:

        async def ask(asked: Request) -> None:
            await lane.infer(asked)
            lane.settle(asked, kept=True)

        x = np.ones((1, 1), np.float32)
        await ask(Request(KEY, {"x": x}, 1, (RequestedOutput("y"),), sequence=SequenceStep(1, True, False)))
        assert memory.used_bytes == page + overhead
        clock.now_s = 2.0
        for sequence in (2, 3):
            await ask(replace(request(sequence, start=True), model=ModelKey("n", 1)))
        assert memory.used_bytes == 2 * (2 * 4 + overhead), "the growing one has ended"
    finally:
        assert await lane.stop()


@pytest.mark.parametrize("seed", range(20))
async def test_growing_states_have_what_their_own_requests_have_added(seed: int) -> None:
    """Sequences that come, go, fail and begin again, whatever is batched with them and wherever their slots are."""
    draws = random.Random(seed)
    rules = rules_of(config(GROWS, LENGTHS), GROWING, {})
    assert rules is not None
    assert rules.most_length == 40
    info = with_sequences(GROWING, rules)
    assert ([t.name for t in info.inputs], info.dynamic.constraints, info.context) == (["x"], ("t <= 8",), 40)

    def padded(x: Any, length: Any, past: Any) -> dict[str, Any]:
        if (x > 900).any():
            raise InvalidRequest("a value is too large")
        assert len(past) in (1, 2, 4)
        assert past.base is not None
        return grown(x=x, length=length, past=past[: len(x)])

    lane = ComputeLane(Scheduler(64))
    predicted = {Bucket(n): 1e-4 * (1 + n / 8) for n in (1, 2, 4)}
    servable = FakeServable(info, padded, predicted_s=predicted)
    lane.add(servable, ModelStatistics(), Policy(batch_delay_s=1e-4), rules)
    lane.start()
    known: dict[int, list[float]] = {}
    found = lane.sequences(KEY)
    assert found is not None

    async def step(one: Request, fate: str) -> Any:
        try:
            answer = await lane.infer(one)
        except InvalidRequest:
            return InvalidRequest
        lane.settle(one, kept=fate == "kept")
        return answer.outputs["y"][0].tolist()

    try:
        for _ in range(60):
            chosen, count = draws.sample(range(1, 12), draws.randint(1, 4)), draws.choice([1, 1, 1, 3])
            asked, expected = list[tuple[Request, str]](), list[Any]()
            for sequence in chosen:
                start, end = draws.random() < (0.1 if sequence in known else 0.9), draws.random() < 0.1
                fate = draws.choices(["kept", "fails", "not written"], [18, 1, 2])[0]
                values = [float(draws.randint(1, 9)) for _ in range(count)]
                before = [] if start else known.get(sequence)
                prefix = None
                others = [other for other in known if other not in chosen]
                if start and others and draws.random() < 0.5:
                    prefix = draws.choice(others), draws.randint(0, 12)
                    before = known[prefix[0]][: prefix[1]] if prefix[1] <= len(known[prefix[0]]) else None
                x = np.array([[1000.0, *values[1:]] if fate == "fails" else values], np.float32)
                turn = SequenceStep(sequence, start, end, prefix)
                asked.append((Request(KEY, {"x": x}, 1, (RequestedOutput("y"),), (count,), sequence=turn), fate))
                if before is None or fate == "fails" or not (end or len(before) + count <= 40):
                    expected.append(InvalidRequest)
                    continue
                expected.append([sum(before + values), len(before) + count])
                if fate == "kept" and end:
                    known.pop(sequence, None)
                elif fate == "kept":
                    known[sequence] = before + values
            lane.pause(KEY)  # so that they wait for one batch
            tasks = [asyncio.create_task(step(*one)) for one in asked]
            for _ in range(5):
                await asyncio.sleep(0)
            lane.resume(KEY)
            assert await asyncio.gather(*tasks) == expected
            for sequence in draws.sample(sorted(known), min(len(known), 2)):
                lane.end_sequence(KEY, sequence, spare=draws.random() < 0.7)
            await asyncio.gather(*lane._ending_sequences)
            known = {sequence: values for sequence, values in known.items() if sequence in found._known}
            assert found.nbytes == sum(one.nbytes + one.slot.nbytes for one in found._known.values() if one.slot)
        held = {id(slot) for block in found._slots._blocks for slot in block.slots if slot is not None}
        assert held == {id(one.slot) for one in found._known.values()}
        for sequence, values in known.items():
            slot = found._known[sequence].slot
            assert slot is not None
            assert found._slots.entries(slot, 0, len(values))[0][0, 0].tolist() == values
        for sequence in known:
            lane.end_sequence(KEY, sequence)
        await asyncio.gather(*lane._ending_sequences)
        assert (found.count, found.nbytes) == (0, 0)
        assert not any(block.states[0].array.any() for block in found._slots._blocks), "no memory is left"
    finally:
        assert await lane.stop()


@pytest.mark.parametrize(
    ("text", "batches", "weights", "continues"),
    [
        (GROWS, (1, 2, 4), "w", True),
        (GROWS + " max_sequence_idle_microseconds: 60000000", (1, 2, 4), "w", True),
        (GROWS, (1, 2, 4), "others", False),
        (GROWS, (1, 2), "w", False),
        (GROWS + " control_input { name: 'flag' control { int32_false_true: [0, 1] } }", (1, 2, 4), "w", False),
    ],
)
async def test_sequences_continue_after_a_reload_with_the_same_weights_and_states(
    text: str, batches: tuple[int, ...], weights: str, continues: bool
) -> None:
    whole = replace(GROWING, inputs=(*GROWING.inputs, TensorSpec("flag", "INT32", (1,))))
    memory = StateMemory(1 << 20)
    lane = ComputeLane(Scheduler(64), state_memory=memory)

    def load(text: str, batches: tuple[int, ...], weights: str) -> None:
        rules = rules_of(config(text, LENGTHS), whole, {})

        def step(x: Any, length: Any, past: Any, flag: Any = None) -> dict[str, Any]:
            return grown(x, length, past[: len(x)])

        info = with_sequences(whole, rules)
        predicted = {Bucket(n): 1e-3 for n in batches}
        lane.add(FakeServable(info, step, predicted_s=predicted), ModelStatistics(), None, rules, weights)

    async def ask(sequence: int, start: bool) -> list[float]:
        x = np.ones((1, 1), np.float32)
        turn = SequenceStep(sequence, start, end=False)
        asked = Request(KEY, {"x": x}, 1, (RequestedOutput("y"),), (1,), sequence=turn)
        answer = await lane.infer(asked)
        lane.settle(asked, kept=True)
        found: list[float] = answer.outputs["y"][0].tolist()
        return found

    load(GROWS, (1, 2, 4), "w")
    lane.start()
    try:
        for sequence in (1, 2):
            assert await ask(sequence, start=True) == [1, 1]
        used_bytes = memory.used_bytes
        load(text, batches, weights)
        await lane.finish(KEY, 1.0, older_only=True)
        if continues:
            assert await ask(1, start=False) == [2, 2]
            assert memory.used_bytes == used_bytes, "an entry of a page that it had"
        else:
            with pytest.raises(SequenceLost):
                await ask(1, start=False)
            assert await ask(1, start=True) == [1, 1]
            gc.collect()
            assert memory.used_bytes == used_bytes / 2
    finally:
        assert await lane.stop()


def test_the_memory_of_slots_ends_with_their_load() -> None:
    """Without waiting for the garbage collector."""
    rules = rules_of(config(GROWS, LENGTHS), GROWING, {})
    assert rules is not None
    gc.disable()
    try:
        slots = StateSlots(rules.states, 40, (1, 2), threading.RLock(), batched=True)
        slots.take()
        block = weakref.ref(slots._blocks[0])
        del slots
        assert block() is None
    finally:
        gc.enable()

"""Which bytes of the arena belong to which model, and how models move while the others stay."""

import random

import pytest

from cohabit.planner.memory import Memory
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.partitions import (
    Extent,
    Move,
    Partitions,
    ReleaseForMove,
    moves,
    packed,
    vacate_all,
)


def no_overlap(extents: list[Extent], workspace_bytes: int, arena_bytes: int) -> bool:
    owner: dict[int, int] = dict.fromkeys(range(workspace_bytes), -1)
    for number, extent in enumerate(extents):
        for byte in range(extent.offset, extent.end):
            if byte in owner or byte >= arena_bytes:
                return False
            owner[byte] = number
    return True


def test_partitions_come_from_the_top_and_leave_the_middle_to_the_workspace() -> None:
    partitions = Partitions(100, 10)
    assert partitions.take("a", 30) == Extent(70, 30)
    assert partitions.take("b", 20) == Extent(50, 20)
    assert partitions.gaps() == [Extent(10, 40)]
    assert partitions.grow_workspace(50)
    assert not partitions.grow_workspace(51)
    assert partitions.workspace_bytes == 50
    assert partitions.take("c", 1) is None


def test_the_tightest_gap_that_will_do_is_used() -> None:
    partitions = Partitions(100)
    for name in "abcd":
        partitions.take(name, 20)
    partitions.release("b")
    assert partitions.take("small", 15) == Extent(65, 15)
    assert partitions.free_bytes == 25


def test_everything_is_free_again_when_the_last_model_has_left() -> None:
    partitions = Partitions(100, 40)
    partitions.take("a", 60)
    assert partitions.take("empty", 0) is not None
    assert partitions.free_bytes == 0
    partitions.release("a")
    partitions.release("empty")
    assert (partitions.workspace_bytes, partitions.free_bytes) == (0, 100)


def test_memories_are_what_is_free_beside_each_workspace() -> None:
    partitions = Partitions(100, 10)
    partitions.take("a", 20)
    partitions.take("b", 30)
    partitions.release("a")
    assert partitions.memories([5, 30, 60]) == [Memory(10, 40), Memory(30, 20)]


def test_each_lane_has_a_workspace_and_none_grows_while_models_use_it() -> None:
    partitions = Partitions(100, lanes=2)
    assert partitions.grow_workspace(20)
    assert not partitions.grow_workspace(51), "twice as much is more than the arena"
    assert partitions.workspaces == Extent(0, 40)
    assert partitions.take("a", 30) == Extent(70, 30)
    assert partitions.gaps() == [Extent(40, 30)]
    assert [room.workspace_bytes for room in partitions.memories([10, 20, 25])] == [20]
    assert not partitions.grow_workspace(21), "the second lane's would begin elsewhere"
    partitions.release("a")
    assert partitions.grow_workspace(50)


@pytest.mark.parametrize("seed", range(30))
def test_bytes_never_have_two_owners(seed: int) -> None:
    rng = random.Random(seed)
    partitions = Partitions(200, rng.randint(0, 40))
    for step in range(100):
        if partitions.held and rng.random() < 0.4:
            partitions.release(rng.choice(list(partitions.held)))
        elif rng.random() < 0.1:
            partitions.grow_workspace(rng.randint(0, 80))
        else:
            before = max((gap.nbytes for gap in partitions.gaps()), default=0)
            nbytes = rng.randint(0, 60)
            assert (partitions.take(str(step), nbytes) is None) == (nbytes > before)
        held = list(partitions.held.values())
        assert no_overlap(held, partitions.workspace_bytes, 200)
        assert partitions.free_bytes == 200 - partitions.workspace_bytes - sum(e.nbytes for e in held)


def test_shrinking_models_move_together_without_leaving() -> None:
    now = {"a": Extent(60, 40), "b": Extent(20, 40)}
    wanted = packed({"a": 30, "b": 30, "new": 20}, now, 100)
    assert wanted == {"a": Extent(70, 30), "b": Extent(40, 30), "new": Extent(20, 20)}
    assert moves(now, wanted, 20) == [
        Move("a", Extent(70, 30)),
        Move("b", Extent(40, 30)),
        Move("new", Extent(20, 20)),
    ]


def test_models_in_each_others_place_cannot_both_stay() -> None:
    now = {"a": Extent(0, 50), "b": Extent(50, 50)}
    steps = moves(now, {"a": Extent(50, 50), "b": Extent(0, 50)}, 0)
    assert [type(step) for step in steps] == [ReleaseForMove, Move, Move]


def test_where_all_workspaces_move_every_model_leaves_before_the_first_one_comes() -> None:
    wanted = {"a": Extent(80, 20), "b": Extent(100, 0)}
    assert vacate_all(wanted) == [
        ReleaseForMove("a"),
        ReleaseForMove("b"),
        Move("a", wanted["a"]),
        Move("b", wanted["b"]),
    ]


def test_a_model_that_lies_where_the_workspace_grows_leaves_first() -> None:
    now = {"a": Extent(60, 40), "b": Extent(20, 30)}
    steps = moves(now, {"a": Extent(70, 30), "b": Extent(45, 25)}, 30)
    assert steps[0] == ReleaseForMove("b")
    assert set(steps[1:]) == {Move("a", Extent(70, 30)), Move("b", Extent(45, 25))}


@pytest.mark.parametrize("seed", range(60))
def test_moves_end_where_they_should_and_overwrite_no_model(seed: int) -> None:
    rng = random.Random(seed)

    def places(names: list[str], workspace: int) -> dict[str, Extent]:
        rng.shuffle(names)
        found, low = {}, workspace
        for name in names:
            low += rng.randint(0, 10)
            found[name] = Extent(low, rng.randint(0, 20))
            low = found[name].end
        return found

    names = [str(i) for i in range(rng.randint(1, 8))]
    now, workspace = places(list(names), 10), rng.randint(10, 40)
    wanted = places([*names, "new"], workspace)
    at = dict(now)
    for step in moves(now, wanted, workspace):
        if isinstance(step, ReleaseForMove):
            del at[step.owner]
        else:
            others = [extent for name, extent in at.items() if name != step.owner]
            assert not any(step.extent.overlaps(other) for other in others)
            assert not step.extent.overlaps(Extent(0, workspace))
            at[step.owner] = step.extent
    assert at == wanted


@pytest.mark.parametrize("arena_bytes", [100_000_000, 66_218_092, 1 << 20, 4097])
def test_partitions_begin_at_whole_blocks_whatever_the_memory(arena_bytes: int) -> None:
    memory = PartitionedMemory(CpuBackend(), lanes=1)
    memory.open(arena_bytes)
    extent = memory.partitions.take("a", BLOCK_BYTES)
    assert extent is not None
    assert extent.offset % BLOCK_BYTES == 0
    assert memory.partitions.arena_bytes <= arena_bytes

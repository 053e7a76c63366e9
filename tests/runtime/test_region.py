"""A shared region: who leaves, what is copied where, and what a copy waits for."""

import itertools
import random

import pytest

from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.shared_region.region import Fetch, FetchPlan, Keeps, ParameterRegion, ParameterUses

PAGE = 4096


def model(name: str, *pages: int) -> ParameterUses:
    """One parameter a step, of so many pages."""
    return ParameterUses(name, {n: p * PAGE for n, p in enumerate(pages)}, tuple((n,) for n in range(len(pages))))


def names(region: ParameterRegion) -> set[str]:
    return {name for name, _ in region.held}


def fetched(plan: FetchPlan) -> list[int]:
    return [fetch.segment for fetch in plan.fetches]


def test_whole_models_leave_in_the_order_of_their_last_use_and_no_more_than_must() -> None:
    region = ParameterRegion(0, 8 * PAGE, "models", whole=True)
    for name in "abcd":
        region.plan_run(model(name, 1, 1))
    region.plan_run(model("a", 1, 1))
    region.plan_run(model("e", 1, 1))
    assert names(region) == {"a", "c", "d", "e"}
    region.plan_run(model("f", 2, 2))
    assert names(region) == {"a", "e", "f"}
    assert region.plan_run(model("a", 1, 1)).fetches == ()


def test_a_model_comes_in_pieces_where_what_is_free_is_not_in_one() -> None:
    region = ParameterRegion(0, 6 * PAGE, "models", whole=True)
    for name in "abcdef":
        region.plan_run(model(name, 1))
    for name in "bdf":
        region.plan_run(model(name, 1))
    region.plan_run(model("g", 1, 1, 1))
    assert names(region) == {"b", "d", "f", "g"}


def test_a_model_comes_back_to_where_it_was_if_that_is_free() -> None:
    region = ParameterRegion(0, 4 * PAGE, "models", whole=True)
    first = {name: region.plan_run(model(name, 1, 1)).fetches[0].offset for name in "ab"}
    region.plan_run(model("c", 1, 1))  # presses a out, and is there
    assert region.plan_run(model("a", 1, 1)).fetches[0].offset == first["b"], "it goes on to what is free"
    region.forget("c")
    region.forget("a")
    region.plan_run(model("d", 1))
    assert region.plan_run(model("b", 1, 1)).fetches[0].offset == first["b"]
    region.forget("b")
    assert region.plan_run(model("a", 1, 1)).fetches[0].offset == first["b"], "the newer of its two places is free"


def test_parameters_leave_one_by_one_whosever_they_are() -> None:
    region = ParameterRegion(0, 4 * PAGE, "tensors", whole=False)
    region.plan_run(model("a", 1, 1))
    region.plan_run(model("b", 1, 1))
    region.plan_run(model("c", 1))
    assert set(region.held) == {("a", 1), ("b", 0), ("b", 1), ("c", 0)}
    assert fetched(region.plan_run(model("a", 1, 1))) == [0, 1], "its first pressed its second out"


def test_a_model_larger_than_the_region_streams_through_it_and_each_copy_waits_for_those_who_read_its_bytes() -> (
    None
):
    for keeps in ("one", "tensors"):
        plan = ParameterRegion(0, 2 * PAGE, keeps, whole=False).plan_run(model("a", 1, 1, 1, 1))
        assert plan.fetches == (
            Fetch(0, 0, 0, 0), Fetch(1, PAGE, 1, 0), Fetch(2, 0, 2, 1), Fetch(3, PAGE, 3, 2)
        )  # fmt: skip


def test_what_a_step_has_already_moves_where_it_is_in_the_way_of_the_rest() -> None:
    region = ParameterRegion(0, 3 * PAGE, "tensors", whole=False)
    region.plan_run(model("x", 1))
    uses = ParameterUses("a", {0: PAGE, 1: 2 * PAGE}, ((0,), (0, 1)))
    region.plan_run(ParameterUses("x", {0: PAGE}, ((0,),)))
    plan = region.plan_run(uses)
    assert plan.fetches[-1].segment == 1
    check_bytes(region, uses, plan)
    assert names(region) == {"a"}


def test_a_model_that_can_never_fit_is_refused_with_the_numbers() -> None:
    for keeps in ("one", "models"):
        with pytest.raises(MemoryExceeded, match=r"big: its parameters take 12.0 KiB.*has 8.0 KiB"):
            ParameterRegion(0, 2 * PAGE, keeps, whole=True).plan_run(model("big", 1, 2))
    with pytest.raises(MemoryExceeded, match=r"big: the parameters of one of its ops take 12.0 KiB"):
        ParameterRegion(0, 2 * PAGE, "tensors", whole=False).plan_run(model("big", 1, 3))


def check_bytes(region: ParameterRegion, uses: ParameterUses, plan: FetchPlan) -> None:
    """Play a run step by step: whatever a step reads is there, and no copy overwrites what is still to be read.

    Written without the region's own books: a list of who is where.
    """
    there = dict(plan.present)
    pending = list(plan.fetches)
    readers: list[tuple[int, int, int]] = []
    for step, segments in enumerate(uses.by_step):
        while pending and pending[0].needed_by == step:
            fetch = pending.pop(0)
            end = fetch.offset + uses.nbytes[fetch.segment]
            assert region.offset <= fetch.offset
            assert end <= region.offset + region.nbytes
            assert all(
                fetch.computes_before > read for low, high, read in readers if low < end and fetch.offset < high
            )
            assert fetch.computes_before <= step, "nothing waits for a step that waits for it"
            there = {s: o for s, o in there.items() if o >= end or o + uses.nbytes[s] <= fetch.offset}
            there[fetch.segment] = fetch.offset
        for segment in segments:
            assert segment in there, f"step {step} reads {segment}, which is not there"
            readers.append((there[segment], there[segment] + uses.nbytes[segment], step))
    assert not pending


@pytest.mark.parametrize("keeps", ["one", "models", "tensors"])
@pytest.mark.parametrize("seed", range(15))
def test_whatever_runs_in_whatever_order_every_step_finds_its_parameters_inside_the_region(
    keeps: Keeps, seed: int
) -> None:
    rng = random.Random(seed)
    region = ParameterRegion(3 * PAGE, 16 * PAGE, keeps, whole=keeps == "models")
    models = []
    for n in range(5):
        nbytes = {s: rng.randint(1, 4) * PAGE for s in range(rng.randint(1, 4 if keeps == "models" else 9))}
        steps = [(s,) for s in nbytes] + [tuple(rng.sample(sorted(nbytes), min(2, len(nbytes)))) for _ in range(3)]
        rng.shuffle(steps)
        models.append(ParameterUses(f"m{n}", nbytes, tuple(steps)))
    for _ in range(60):
        if keeps == "models" and region.held and rng.random() < 0.4:
            running, ahead = next(reversed(region.held))[0], rng.choice(models)
            own = {key: extent for key, extent in region.held.items() if key[0] == running}
            if ahead.model != running and (copied := region.plan_ahead(ahead, running)) is not None:
                check_bytes(region, ahead, copied)
            assert own.items() <= region.held.items(), "the running model keeps its bytes"
        uses = rng.choice(models)
        before = dict(region.held)
        plan = region.plan_run(uses, prefetch=rng.random() < 0.7)
        assert {s: before[uses.model, s][0] for s, _ in plan.present} == dict(plan.present), "only what was there"
        check_bytes(region, uses, plan)
        extents = sorted(region.held.values())
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(extents))
        assert all(region.offset <= o and o + n <= region.offset + region.nbytes for o, n in extents)

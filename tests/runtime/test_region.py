"""A shared region: who leaves, what is copied where, and what a copy waits for."""

import itertools
import random

import pytest

from runtime.errors import MemoryExceeded
from runtime.shared_region.region import Fetch, Keeps, Region, Uses, Visit

PAGE = 4096


def model(name: str, *pages: int) -> Uses:
    """One parameter a step, of so many pages."""
    return Uses(name, {n: p * PAGE for n, p in enumerate(pages)}, tuple((n,) for n in range(len(pages))))


def names(region: Region) -> set[str]:
    return {name for name, _ in region.held}


def fetched(visit: Visit) -> list[int]:
    return [fetch.segment for fetch in visit.fetches]


def test_one_model_at_a_time_comes_whole_to_the_same_bytes_and_stays_until_another_runs() -> None:
    region = Region(PAGE, 6 * PAGE, "one", whole=True)
    first = region.visit(model("a", 1, 2))
    assert first == Visit((), (Fetch(0, PAGE, 0, 0), Fetch(1, 2 * PAGE, 1, 0)))
    assert region.visit(model("a", 1, 2)) == Visit(((0, PAGE), (1, 2 * PAGE)), ())
    region.visit(model("b", 1))
    assert names(region) == {"b"}
    assert region.visit(model("a", 1, 2)) == first


def test_whole_models_leave_in_the_order_of_their_last_use_and_no_more_than_must() -> None:
    region = Region(0, 8 * PAGE, "models", whole=True)
    for name in "abcd":
        region.visit(model(name, 1, 1))
    region.visit(model("a", 1, 1))
    region.visit(model("e", 1, 1))
    assert names(region) == {"a", "c", "d", "e"}
    region.visit(model("f", 2, 2))
    assert names(region) == {"a", "e", "f"}
    assert region.visit(model("a", 1, 1)).fetches == ()


def test_a_model_comes_in_pieces_where_what_is_free_is_not_in_one() -> None:
    region = Region(0, 6 * PAGE, "models", whole=True)
    for name in "abcdef":
        region.visit(model(name, 1))
    for name in "bdf":
        region.visit(model(name, 1))
    region.visit(model("g", 1, 1, 1))
    assert names(region) == {"b", "d", "f", "g"}


def test_a_model_comes_back_to_where_it_was_if_that_is_free() -> None:
    region = Region(0, 4 * PAGE, "models", whole=True)
    first = {name: region.visit(model(name, 1, 1)).fetches[0].offset for name in "ab"}
    region.visit(model("c", 1, 1))  # presses a out, and is there
    assert region.visit(model("a", 1, 1)).fetches[0].offset == first["b"], "it goes on to what is free"
    region.forget("c")
    region.forget("a")
    region.visit(model("d", 1))
    assert region.visit(model("b", 1, 1)).fetches[0].offset == first["b"]
    region.forget("b")
    assert region.visit(model("a", 1, 1)).fetches[0].offset == first["b"], "the newer of its two places is free"


def test_parameters_leave_one_by_one_whosever_they_are() -> None:
    region = Region(0, 4 * PAGE, "tensors", whole=False)
    region.visit(model("a", 1, 1))
    region.visit(model("b", 1, 1))
    region.visit(model("c", 1))
    assert set(region.held) == {("a", 1), ("b", 0), ("b", 1), ("c", 0)}
    assert fetched(region.visit(model("a", 1, 1))) == [0, 1], "its first pressed its second out"


def test_a_model_larger_than_the_region_streams_through_it_and_each_copy_waits_for_those_who_read_its_bytes() -> (
    None
):
    for keeps in ("one", "tensors"):
        visit = Region(0, 2 * PAGE, keeps, whole=False).visit(model("a", 1, 1, 1, 1))
        assert visit.fetches == (
            Fetch(0, 0, 0, 0), Fetch(1, PAGE, 1, 0), Fetch(2, 0, 2, 1), Fetch(3, PAGE, 3, 2)
        )  # fmt: skip


def test_without_prefetch_a_copy_waits_until_its_step_is_next() -> None:
    visit = Region(0, 4 * PAGE, "tensors", whole=False).visit(model("a", 1, 1, 1), prefetch=False)
    assert [fetch.behind for fetch in visit.fetches] == [0, 1, 2]


def test_what_a_step_has_already_moves_where_it_is_in_the_way_of_the_rest() -> None:
    region = Region(0, 3 * PAGE, "tensors", whole=False)
    region.visit(model("x", 1))
    uses = Uses("a", {0: PAGE, 1: 2 * PAGE}, ((0,), (0, 1)))
    region.visit(Uses("x", {0: PAGE}, ((0,),)))
    visit = region.visit(uses)
    assert visit.fetches[-1].segment == 1
    check_bytes(region, uses, visit)
    assert names(region) == {"a"}


def test_a_model_that_can_never_fit_is_refused_with_the_numbers() -> None:
    for keeps in ("one", "models"):
        with pytest.raises(MemoryExceeded, match=r"big: its parameters take 12.0 KiB.*has 8.0 KiB"):
            Region(0, 2 * PAGE, keeps, whole=True).visit(model("big", 1, 2))
    with pytest.raises(MemoryExceeded, match=r"big: the parameters of one of its ops take 12.0 KiB"):
        Region(0, 2 * PAGE, "tensors", whole=False).visit(model("big", 1, 3))


def test_a_model_whose_copies_failed_comes_anew() -> None:
    region = Region(0, 4 * PAGE, "models", whole=True)
    region.visit(model("a", 1, 1))
    region.visit(model("b", 1, 1))
    region.forget("a")
    assert fetched(region.visit(model("a", 1, 1))) == [0, 1]
    assert region.visit(model("b", 1, 1)).fetches == ()


def check_bytes(region: Region, uses: Uses, visit: Visit) -> None:
    """Play a visit step by step: whatever a step reads is there, and no copy overwrites what is still to be read.

    Written without the region's own books: a list of who is where.
    """
    there = dict(visit.places)
    pending = list(visit.fetches)
    readers: list[tuple[int, int, int]] = []
    for step, segments in enumerate(uses.by_step):
        while pending and pending[0].needed_by == step:
            fetch = pending.pop(0)
            end = fetch.offset + uses.nbytes[fetch.segment]
            assert region.offset <= fetch.offset
            assert end <= region.offset + region.nbytes
            assert all(fetch.behind > read for low, high, read in readers if low < end and fetch.offset < high)
            assert fetch.behind <= step, "nothing waits for a step that waits for it"
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
    region = Region(3 * PAGE, 16 * PAGE, keeps, whole=keeps == "models")
    models = []
    for n in range(5):
        nbytes = {s: rng.randint(1, 4) * PAGE for s in range(rng.randint(1, 4 if keeps == "models" else 9))}
        steps = [(s,) for s in nbytes] + [tuple(rng.sample(sorted(nbytes), min(2, len(nbytes)))) for _ in range(3)]
        rng.shuffle(steps)
        models.append(Uses(f"m{n}", nbytes, tuple(steps)))
    for _ in range(60):
        uses = rng.choice(models)
        before = dict(region.held)
        visit = region.visit(uses, prefetch=rng.random() < 0.7)
        assert {s: before[uses.model, s][0] for s, _ in visit.places} == dict(visit.places), "only what was there"
        check_bytes(region, uses, visit)
        extents = sorted(region.held.values())
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(extents))
        assert all(region.offset <= o and o + n <= region.offset + region.nbytes for o, n in extents)

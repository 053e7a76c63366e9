"""The free list, beside a map of bytes."""

import random

import numpy as np

from cohabit.planner.free_list import FreeList


def test_adjacent_ranges_merge() -> None:
    free = FreeList(10, 30)
    assert [free.take(10), free.take(10), free.take(10), free.take(1)] == [10, 20, 30, None]
    free.release(30, 10)
    free.release(10, 10)
    assert (free.take(11), free.free_bytes) == (None, 20)
    free.release(20, 10)
    free.take_at(15, 5)
    assert [free.take(8, alignment=8), free.take(12), free.take(5)] == [24, None, 10]


def test_no_bytes_are_there_even_where_none_are_free() -> None:
    free = FreeList(0, 4)
    assert (free.take(4), free.take(1), free.take(0)) == (0, None, 0)
    free.take_at(2, 0)
    free.release(2, 0)
    assert free.free_bytes == 0


def test_a_copy_is_a_list_of_its_own() -> None:
    free = FreeList(0, 8)
    free.take(3)
    other = free.copy()
    assert (other.take(5), other.free_bytes, free.free_bytes) == (3, 0, 5)


def test_a_free_list_agrees_with_a_map_of_bytes() -> None:
    rng = random.Random(0)
    free, taken, held = FreeList(0, 64), np.zeros(64, bool), list[tuple[int, int]]()
    for _ in range(2000):
        if held and rng.random() < 0.5:
            start, nbytes = held.pop(rng.randrange(len(held)))
            taken[start : start + nbytes] = False
            free.release(start, nbytes)
        else:
            nbytes, alignment = rng.randint(1, 20), rng.choice((1, 2, 8))
            fits = [i for i in range(0, 65 - nbytes, alignment) if not taken[i : i + nbytes].any()]
            start_or_none = free.take(nbytes, alignment)
            assert start_or_none == (fits[0] if fits else None), "first fit"
            if start_or_none is not None:
                taken[start_or_none : start_or_none + nbytes] = True
                held.append((start_or_none, nbytes))
        assert free.free_bytes == 64 - taken.sum()
        assert all(free.has(i, 1) != taken[i] for i in range(64))

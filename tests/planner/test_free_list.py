"""The free list, beside a map of bytes."""

import random

import numpy as np

from cohabit.planner.free_list import FreeList

SIZE = 64


def test_a_free_list_agrees_with_a_map_of_bytes() -> None:
    """Bytes are taken by first fit or at an address, and returned whole or in part; a copy is a list of its own."""
    rng = random.Random(0)
    free, taken = FreeList(0, SIZE), np.zeros(SIZE, bool)
    for _ in range(3000):
        match rng.choice(("take", "take", "take at", "release", "release", "release")):
            case "take":
                nbytes, alignment = rng.randint(0, 20), rng.choice((1, 2, 8))
                fits = [i for i in range(0, SIZE + 1 - nbytes, alignment) if not taken[i : i + nbytes].any()]
                start = free.take(nbytes, alignment)
                assert start in (fits[:1] or [None]) or nbytes == 0, "first fit"
                if start is not None:
                    taken[start : start + nbytes] = True
            case "take at":
                start, nbytes = rng.randrange(SIZE), rng.randint(0, 9)
                if start + nbytes <= SIZE and not taken[start : start + nbytes].any():
                    free.take_at(start, nbytes)
                    taken[start : start + nbytes] = True
            case "release":
                start, nbytes = rng.randrange(SIZE), rng.choice((0, 1, 3, 9))
                if start + nbytes <= SIZE and taken[start : start + nbytes].all():
                    free.release(start, nbytes)
                    taken[start : start + nbytes] = False
        other = free.copy()
        other.take(rng.randint(1, 9))
        assert free.free_bytes == SIZE - taken.sum()
        start, nbytes = rng.randrange(SIZE), rng.randint(1, 20)
        inside = start + nbytes <= SIZE
        assert free.has(start, nbytes) == (inside and not taken[start : start + nbytes].any())
        assert all(free.has(i, 1) != taken[i] for i in range(SIZE))


def test_addresses_begin_where_the_list_does_and_no_bytes_are_always_there() -> None:
    free = FreeList(10, 30)
    assert [free.take(10), free.take(20), free.take(1), free.take(0)] == [10, 20, None, 0]
    assert FreeList(4, 0).take(1) is None

"""The bisection finds the largest number that fits, wherever it starts, and asks for no number twice."""

import pytest

from benchmarks.bisection import largest


@pytest.mark.parametrize("guess", [1, 2, 6, 7, 8, 40, 1000])
@pytest.mark.parametrize("most", [0, 1, 6, 7, 100])
def test_the_largest_is_found_from_every_guess(most: int, guess: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= most

    assert largest(fits, guess, 1) == most
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("guess", [3, 50, 500])
def test_the_answer_is_at_most_a_step_below_what_does_not_fit(guess: int) -> None:
    assert 100 - 8 < largest(lambda number: number <= 100, guess, 8) <= 100

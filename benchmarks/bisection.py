"""The largest number that fits, from a guess."""

from collections.abc import Callable


def largest(fits: Callable[[int], bool], guess: int, step: int) -> int:
    """Return a number that fits, at most `step` below one that does not; 0 if not even the least does.

    What is smaller fits if a number does. Strides away from the guess double until the answer lies between two numbers;
    then their distance is halved.
    """
    low, high, stride = guess, guess, step
    if fits(guess):
        high = guess + stride
        while fits(high):
            stride *= 2
            low, high = high, high + stride
    else:
        low = max(guess - stride, 0)
        while low and not fits(low):
            stride *= 2
            low, high = max(low - stride, 0), low
    while high - low > step:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""Structure of JSON text, found on its bytes before any object is built.

Reads a piece at a time, with NumPy, which releases the GIL meanwhile: a JSON library holds it until the last byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 256 << 10
_LONG_BYTES = 4 << 10
"""An array of numbers counts as long from this size on."""
_QUOTE, _BACKSLASH, _COLON, _OPENING = (ord(character) for character in '"\\:[')
_SPACES = np.isin(np.arange(256), list(b" \t\r\n"))
_LEVELS = np.zeros(256, np.int32)
_LEVELS[list(b"[{")], _LEVELS[list(b"]}")] = 1, -1
_CONTAINERS = _LEVELS > 0
_OF_VALUES = ~(np.isin(np.arange(256), list(b"[]{},:")) | _SPACES)

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of what becomes an object."""

    keys: int = 0
    strings: int = 0
    """Including the keys."""
    containers: int = 0


def counts_of(text: bytes | memoryview) -> Counts:
    """Count on text that may not be JSON; there, the counts are those of what a parser meets before it fails."""
    keys = quotes = containers = 0
    for _, piece, is_quote, is_inside in _pieces(text):
        keys += int(np.count_nonzero((piece == _COLON) & ~is_inside))
        quotes += int(np.count_nonzero(is_quote))
        containers += int(np.count_nonzero(_CONTAINERS[piece] & ~is_inside))
    return Counts(keys, quotes // 2, containers)


def long_arrays(text: bytes | memoryview) -> list[slice]:
    """Return where the long arrays of values without quotes are: those that no string precedes in the same array."""
    found = [quotes + start for start, _, is_quote, _ in _pieces(text) if (quotes := np.flatnonzero(is_quote)).size]
    quotes = np.concatenate([*found, np.array([len(text)])])
    starts, ends = np.concatenate([[0], quotes[1::2] + 1]), quotes[::2]
    arrays = [
        _first_array(text, int(start), int(end))
        for start, end in zip(starts, ends, strict=False)
        if end - start >= _LONG_BYTES
    ]
    return [array for array in arrays if array is not None and array.stop - array.start >= _LONG_BYTES]


def without_space(text: bytes | memoryview) -> bytes:
    """Remove the white space of an array of values without strings. Raises ValueError between two values."""
    kept: list[bytes] = []
    before = False
    """Whether the last byte kept belongs to a value, and white space follows it."""
    last_of_value = False
    for start in range(0, len(text), PIECE_BYTES):
        piece = _piece(text, start, len(text))
        places = np.flatnonzero(~_SPACES[piece])
        if not places.size:
            before |= last_of_value
            continue
        values = _OF_VALUES[piece[places]]
        is_first_apart = places[0] > 0 or before
        apart = np.diff(places) > 1
        if (values[0] and is_first_apart and last_of_value) or (apart & values[:-1] & values[1:]).any():
            raise ValueError("two values without a comma between them")
        kept.append(piece[places].tobytes())
        last_of_value = bool(values[-1])
        before = last_of_value and places[-1] < piece.size - 1
    return b"".join(kept)


def _first_array(text: bytes | memoryview, start: int, end: int) -> slice | None:
    """Return the first whole array between two strings; None if there is none, or it has objects."""
    begin, level = None, 0
    for at in range(start, end, PIECE_BYTES):
        piece = _piece(text, at, end)
        skipped = 0
        if begin is None:
            openings = np.flatnonzero(piece == _OPENING)
            if not openings.size:
                continue
            skipped = int(openings[0])
            begin = at + skipped
        levels = level + np.cumsum(_LEVELS[piece[skipped:]], dtype=np.int32)
        closed = np.flatnonzero(levels <= 0)
        if closed.size:
            return slice(begin, at + skipped + int(closed[0]) + 1)
        level = int(levels[-1])
    return None


def _piece(text: bytes | memoryview, start: int, end: int) -> Bytes:
    return np.frombuffer(text, np.uint8, min(PIECE_BYTES, end - start), start)


def _pieces(text: bytes | memoryview) -> Iterator[tuple[int, Bytes, Mask, Mask]]:
    """Yield pieces with their start: their bytes, which are quotes of strings, and which are inside of strings.

    A string's first quote counts as inside, its last one as outside.
    """
    inside = odd_backslashes = False
    for start in range(0, len(text), PIECE_BYTES):
        piece = _piece(text, start, len(text))
        is_quote: Mask = piece == _QUOTE
        is_backslash = piece == _BACKSLASH
        if odd_backslashes or is_backslash.any():
            after_odd = _after_odd(is_backslash, odd_backslashes)
            is_quote &= ~after_odd[:-1]
            odd_backslashes = bool(after_odd[-1])
        is_inside = np.logical_xor.accumulate(is_quote) ^ inside
        inside = bool(is_inside[-1])
        yield start, piece, is_quote, is_inside


def _after_odd(is_backslash: Mask, odd_before: bool) -> Mask:
    """Return for each byte, and for the one after the last, whether an odd number of backslashes directly precedes."""
    places = np.arange(is_backslash.size, dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(is_backslash, np.int32(-1), places))
    lengths = places - last_other + (odd_before & (last_other < 0))
    return np.concatenate([[odd_before], lengths % 2 == 1])

"""Slots: the values that a call takes from its frame, wherever they stand in its arguments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Frame = list[Any]
"""Every value of a run, by slot."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that an instruction takes from the frame."""

    index: int


def slots_of(tree: Any) -> Iterator[int]:
    """The slots of arguments, in order and as often as they stand there."""
    if isinstance(tree, Slot):
        yield tree.index
    elif isinstance(tree, list | tuple):
        for leaf in tree:
            yield from slots_of(leaf)
    elif isinstance(tree, dict):
        yield from slots_of(tuple(tree.values()))


def filled(tree: Any, take: Callable[[Slot], Any]) -> Any:
    """The same lists, tuples and dictionaries with something else where the slots are."""
    if isinstance(tree, Slot):
        return take(tree)
    if isinstance(tree, list):
        return [filled(leaf, take) for leaf in tree]
    if isinstance(tree, tuple):
        return tuple(filled(leaf, take) for leaf in tree)
    if isinstance(tree, dict):
        return {key: filled(leaf, take) for key, leaf in tree.items()}
    return tree

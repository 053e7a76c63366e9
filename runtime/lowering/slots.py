"""Slots: positions in a frame, which holds every value of one run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Frame = list[Any]
"""Every value of a run, by slot."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Position in the frame of a value that an instruction reads."""

    index: int


def slots_of(tree: Any) -> Iterator[int]:
    """Yield the slots in a tree of arguments, in order, once per occurrence."""
    if isinstance(tree, Slot):
        yield tree.index
    elif isinstance(tree, list | tuple):
        for leaf in tree:
            yield from slots_of(leaf)
    elif isinstance(tree, dict):
        yield from slots_of(tuple(tree.values()))


def filled(tree: Any, value_of: Callable[[Slot], Any]) -> Any:
    """Return the tree with `value_of(slot)` in place of each slot."""
    if isinstance(tree, Slot):
        return value_of(tree)
    if isinstance(tree, list):
        return [filled(leaf, value_of) for leaf in tree]
    if isinstance(tree, tuple):
        return tuple(filled(leaf, value_of) for leaf in tree)
    if isinstance(tree, dict):
        return {key: filled(leaf, value_of) for key, leaf in tree.items()}
    return tree

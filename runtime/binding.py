"""Instructions bound to places: views of parameters made beforehand, and calls that take the rest from a frame."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from runtime.memory import Memory
from runtime.specialize import Instruction, Slot, Trace
from runtime.weights import Manifest, dtype_of

Frame = list[Any]
Call = Callable[[Frame], None]


class Statics:
    """Parameters, and views of parameters alone: tensors that are known as soon as addresses are."""

    def __init__(self, trace: Trace, manifest: Manifest, arena: Memory[Any]) -> None:
        self._arena = arena
        self._views = {i.out: i for i in trace.instructions if i.op is None}
        self._pieces = {p.name: (n, p) for n, s in enumerate(manifest.segments) for p in s.pieces}
        self._weights = trace.weight_slots
        self._static = set(trace.weight_slots)
        for instruction in trace.instructions:
            reads = instruction.reads
            if instruction.op is None and reads and all(r in self._static for r in reads):
                self._static.add(instruction.out)
        self._known: dict[tuple[int, tuple[int, ...]], Any] = {}

    def is_static(self, slot: int) -> bool:
        return slot in self._static

    def value(self, slot: int, addresses: dict[int, int]) -> Any:
        """The tensor (or tuple of tensors) in a slot, with segments at the given offsets of the arena."""
        key = (slot, tuple(addresses[s] for s in sorted(self._segments(slot))))
        if key not in self._known:
            self._known[key] = self._make(slot, addresses)
        return self._known[key]

    def _segments(self, slot: int) -> set[int]:
        if slot in self._weights:
            return {self._pieces[self._weights[slot]][0]}
        return {s for read in self._views[slot].reads for s in self._segments(read)}

    def _make(self, slot: int, addresses: dict[int, int]) -> Any:
        if slot in self._weights:
            segment, piece = self._pieces[self._weights[slot]]
            offset = addresses[segment] + piece.offset
            return self._arena.tensor(offset, dtype_of(piece.dtype), piece.shape, piece.stride)
        view = self._views[slot]
        frame = {read: self.value(read, addresses) for read in view.reads}
        args, kwargs = _filled((view.args, view.kwargs), frame)
        with torch.inference_mode():
            return view.target(*args, **kwargs)


def _is_slot(value: Any) -> bool:
    return isinstance(value, Slot)


def _filled(tree: Any, frame: Any) -> Any:
    return pytree.tree_map(lambda leaf: frame[leaf.index] if _is_slot(leaf) else leaf, tree, is_leaf=_is_slot)


def bind(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    statics: dict[int, torch.Tensor],
    out: int,
    frees: tuple[int, ...],
) -> Call:
    """A call that takes its slots from the frame, leaves its result there, and forgets what nobody reads again."""

    def known(leaf: Any) -> Any:
        return statics[leaf.index] if _is_slot(leaf) and leaf.index in statics else leaf

    args, kwargs = pytree.tree_map(known, (args, kwargs), is_leaf=_is_slot)
    template = list(args)
    flat = [(i, a.index) for i, a in enumerate(template) if _is_slot(a)]
    nested = [(i, a) for i, a in enumerate(template) if not _is_slot(a) and _has_slot(a)]
    keyword_slots = _has_slot(kwargs)

    def call(frame: Frame) -> None:
        values = template.copy()
        for position, slot in flat:
            values[position] = frame[slot]
        for position, tree in nested:
            values[position] = _filled(tree, frame)
        frame[out] = target(*values, **(_filled(kwargs, frame) if keyword_slots else kwargs))
        for slot in frees:
            frame[slot] = None

    return call


def on_device(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Point an operator at the device: what it is told to make elsewhere or out of nothing, and constants."""
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs), is_leaf=_is_slot
    )
    schema: Any = getattr(target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    if "device" not in names:
        return args, kwargs
    position = names.index("device")
    takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    if position < len(args):
        if args[position] is not None:
            args = (*args[:position], device, *args[position + 1 :])
    elif kwargs.get("device") is not None or not takes_tensors:
        kwargs = {**kwargs, "device": device}
    return args, kwargs


def _has_slot(tree: Any) -> bool:
    return any(_is_slot(leaf) for leaf in pytree.tree_leaves(tree, is_leaf=_is_slot))


def frees(steps: Sequence[Sequence[Instruction]], kept: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each instruction (by identity) the slots that die with it, in the order in which the plan runs them."""
    last: dict[int, Instruction] = {}
    for step in steps:
        for instruction in step:
            last[instruction.out] = instruction
            for slot in instruction.reads:
                last[slot] = instruction
    frees: dict[int, list[int]] = {}
    for slot, instruction in last.items():
        if slot not in kept:
            frees.setdefault(id(instruction), []).append(slot)
    return {key: tuple(slots) for key, slots in frees.items()}

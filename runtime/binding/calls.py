"""Instructions as calls: first what needs no addresses, then the call, which takes the rest from a frame."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from runtime.binding.slots import Frame, Slot, filled, slots_of
from runtime.lowering.rewrite import host_gather
from runtime.lowering.specialize import Instruction

Call = Callable[[Frame], None]


@dataclass(frozen=True, slots=True)
class Form:
    """An instruction on one device, with its slots found: to bind it takes tensors alone."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    flat: tuple[tuple[int, int], ...]
    """Positions of the arguments that are slots, with these."""
    nested: tuple[int, ...]
    """Positions of the arguments that hold slots further in."""
    keyword_slots: bool
    table: str | None
    """The embedding table of the host that stands first."""


def form_of(instruction: Instruction, device: torch.device) -> Form:
    """Find out what every binding of an instruction has in common."""
    target, arguments, table = instruction.target, instruction.args, None
    if target is host_gather:
        target, table = torch.embedding, str(arguments[0])
    args, kwargs = on_device(target, arguments, instruction.kwargs, device)
    return Form(
        target=target,
        args=args,
        kwargs=kwargs,
        out=instruction.out,
        flat=tuple((n, a.index) for n, a in enumerate(args) if isinstance(a, Slot)),
        nested=tuple(n for n, a in enumerate(args) if not isinstance(a, Slot) and _has_slot(a)),
        keyword_slots=_has_slot(kwargs),
        table=table,
    )


def bind(form: Form, statics: Mapping[int, Any], frees: tuple[int, ...], table: torch.Tensor | None = None) -> Call:
    """A call that takes its slots from the frame, leaves its result there, and forgets what nobody reads again.

    `statics` are values that are known now, by slot.
    """
    target, out = form.target, form.out
    template = list(form.args)
    if table is not None:
        template[0] = table
    flat = tuple(entry for entry in form.flat if entry[1] not in statics)
    nested: list[tuple[int, Any]] = []
    kwargs, keyword_slots = form.kwargs, form.keyword_slots
    if statics:

        def known(slot: Slot) -> Any:
            return statics.get(slot.index, slot)

        for position, slot in form.flat:
            if slot in statics:
                template[position] = statics[slot]
        for position in form.nested:
            template[position] = filled(template[position], known)
        if keyword_slots:
            kwargs = filled(kwargs, known)
            keyword_slots = _has_slot(kwargs)
    nested = [(position, template[position]) for position in form.nested if _has_slot(template[position])]

    if target is torch.ops.aten.alias.default and flat:
        return _same(flat[0][1], out, frees)

    function = target._op if isinstance(target, torch._ops.OpOverload) else target  # it only passes on

    def plain(frame: Frame) -> None:
        values = template.copy()
        for position, slot in flat:
            values[position] = frame[slot]
        frame[out] = function(*values, **kwargs)
        for slot in frees:
            frame[slot] = None

    if not (nested or keyword_slots):
        return plain

    def call(frame: Frame) -> None:
        values = template.copy()
        for position, slot in flat:
            values[position] = frame[slot]
        for position, tree in nested:
            values[position] = filled(tree, lambda slot: frame[slot.index])
        own = filled(kwargs, lambda slot: frame[slot.index]) if keyword_slots else kwargs
        frame[out] = function(*values, **own)
        for slot in frees:
            frame[slot] = None

    return call


def _same(source: int, out: int, frees: tuple[int, ...]) -> Call:
    """A call of `alias`, which has nothing to compute: another name for a value."""

    def call(frame: Frame) -> None:
        frame[out] = frame[source]
        for slot in frees:
            frame[slot] = None

    return call


def apply(form: Form, statics: Mapping[int, Any]) -> Any:
    """The result of a call all of whose slots are known now."""

    def known(slot: Slot) -> Any:
        return statics[slot.index]

    with torch.inference_mode():
        return form.target(*filled(form.args, known), **filled(form.kwargs, known))


def on_device(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Point an operator at the device: what it is told to make elsewhere or out of nothing, and constants."""
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
        (args, kwargs),
        is_leaf=lambda leaf: isinstance(leaf, Slot),
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
    return next(slots_of(tree), None) is not None

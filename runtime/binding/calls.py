"""Prepared calls: an instruction becomes a template for a device, and a template becomes a call on a frame."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.model import table_of
from cohabit.runtime.lowering.packing import packed_tensor, stored_bytes
from cohabit.runtime.lowering.slots import Frame, Slot, filled, slots_of
from cohabit.runtime.lowering.trace import Instruction
from cohabit.runtime.lowering.weights import Piece, dtype_of
from cohabit.runtime.memory import DeviceArena, HostStore

Call = Callable[[Frame], None]
aten = torch.ops.aten

_ARITHMETIC = ("add", "sub", "mul", "div")
_ELEMENTWISE = ("exp", "maximum", "minimum", "neg", "relu", "rsqrt", "sigmoid", "sqrt", "tanh")
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    **{getattr(aten, name).Tensor: getattr(torch, name) for name in _ARITHMETIC},
    **{getattr(aten, f"{name}_").Tensor: getattr(torch.Tensor, f"{name}_") for name in _ARITHMETIC},
    **{getattr(aten, name).default: getattr(torch, name) for name in _ELEMENTWISE},
    **{getattr(aten, f"{name}_").default: getattr(torch, f"{name}_") for name in ("relu", "sigmoid", "tanh")},
    aten.alias.default: lambda value: value,
    aten.linear.default: torch.nn.functional.linear,
    aten.mm.default: torch.mm,
    aten.select.int: torch.select,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
"""Torch functions equivalent to operators. They parse arguments faster: 0.4 us less per call."""


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """An instruction for one device with its slots located: binding it needs only tensors."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    flat: tuple[tuple[int, int], ...]
    """(position, slot) of each argument that is a slot."""
    nested: tuple[int, ...]
    """Positions of arguments that contain slots."""
    keyword_slots: bool
    table: str | None
    """Name of the host's embedding table that is the first argument."""


def template_of(instruction: Instruction, device: torch.device) -> CallTemplate:
    """Prepare the part that all bindings of an instruction share."""
    target = instruction.target
    args, kwargs = on_device(target, instruction.args, instruction.kwargs, device)
    return CallTemplate(
        target=target,
        args=args,
        kwargs=kwargs,
        out=instruction.out,
        flat=tuple((n, a.index) for n, a in enumerate(args) if isinstance(a, Slot)),
        nested=tuple(n for n, a in enumerate(args) if not isinstance(a, Slot) and _has_slot(a)),
        keyword_slots=_has_slot(kwargs),
        table=table_of(target, instruction.args),
    )


def bind_call(
    template: CallTemplate, statics: Mapping[int, Any], frees: tuple[int, ...], table: torch.Tensor | None = None
) -> Call:
    """Return a call that reads its slots from the frame, writes its result there, and clears the slots in `frees`.

    `statics` has the values that are already known, by slot.
    """
    target, out = template.target, template.out
    arguments = list(template.args)
    if table is not None:
        arguments[0] = table
    # Known values become constants of the call; the other slots are read in every run.
    flat = tuple(entry for entry in template.flat if entry[1] not in statics)
    kwargs, keyword_slots = template.kwargs, template.keyword_slots
    if statics:

        def known(slot: Slot) -> Any:
            return statics.get(slot.index, slot)

        for position, slot in template.flat:
            if slot in statics:
                arguments[position] = statics[slot]
        for position in template.nested:
            arguments[position] = filled(arguments[position], known)
        if keyword_slots:
            kwargs = filled(kwargs, known)
            keyword_slots = _has_slot(kwargs)
    nested = [(position, arguments[position]) for position in template.nested if _has_slot(arguments[position])]

    function = _FUNCTIONS.get(target)
    if function is None:
        function = (
            target._op if isinstance(target, torch._ops.OpOverload) else target
        )  # skips the forwarding overload

    # The common form has generated source; nested slots take the slower generic call.
    if not (nested or keyword_slots):
        slots = dict(flat)
        form = tuple(position in slots for position in range(len(arguments)))
        values = [slots.get(position, value) for position, value in enumerate(arguments)]
        return _maker(form, bool(kwargs), len(frees))(function, kwargs, out, *values, *frees)

    def call(frame: Frame) -> None:
        values = arguments.copy()
        for position, slot in flat:
            values[position] = frame[slot]
        for position, tree in nested:
            values[position] = filled(tree, lambda slot: frame[slot.index])
        own = filled(kwargs, lambda slot: frame[slot.index]) if keyword_slots else kwargs
        frame[out] = function(*values, **own)
        for slot in frees:
            frame[slot] = None

    return call


@lru_cache(maxsize=1024)
def _maker(slots: tuple[bool, ...], has_keywords: bool, frees: int) -> Callable[..., Call]:
    """Return a factory of calls of one form: which arguments are slots, and how many slots are cleared.

    Its source is generated, because loops over the arguments take as long as a tiny op.
    """
    names, freed = [f"a{n}" for n in range(len(slots))], [f"f{n}" for n in range(frees)]
    given = [f"frame[{name}]" if is_slot else name for name, is_slot in zip(names, slots, strict=True)]
    values = ", ".join([*given, "**kwargs"] if has_keywords else given)
    lines = [f"frame[out] = function({values})", *(f"frame[{name}] = None" for name in freed)]
    source = f"def make({', '.join(['function', 'kwargs', 'out', *names, *freed])}):\n"
    source += " def call(frame):\n" + "".join(f"  {line}\n" for line in lines) + " return call\n"
    scope: dict[str, Any] = {}
    exec(source, scope)
    return cast(Callable[..., Call], scope["make"])


def bind_with_store(
    template: CallTemplate, statics: Mapping[int, Any], frees: tuple[int, ...], store: HostStore[Any]
) -> Call:
    """Return a call that may read rows of one of the store's tables, and then may raise StoreChanged."""
    if template.table is None:
        return bind_call(template, statics, frees)
    gather = bind_call(template, statics, frees, store.table(template.table))
    check = store.check_tables
    if check is None:
        return gather

    def checked(frame: Frame) -> None:
        check()
        gather(frame)
        check()

    return checked


def weight_at(arena: DeviceArena[Any], segment: int, piece: Piece) -> torch.Tensor:
    """Return a parameter over the arena's bytes, given its segment's offset. The arena must outlive it.

    Raises MemoryExceeded outside of the arena.
    """
    offset, dtype = segment + piece.offset, dtype_of(piece.dtype)
    if piece.layout is None:
        return arena.tensor(offset, dtype, piece.shape, piece.stride)
    tensor = packed_tensor(arena.bytes(offset, piece.nbytes).ctypes.data, dtype, piece.shape, piece.layout)
    if stored_bytes(tensor) > piece.nbytes:
        raise UnsupportedModel(
            f"weight {piece.name}: its layout needs {stored_bytes(tensor)} bytes, it has {piece.nbytes}"
        )
    return tensor


def static_value(template: CallTemplate, statics: Mapping[int, Any]) -> Any:
    """Return the result of a call whose slots are all in `statics`."""

    def known(slot: Slot) -> Any:
        return statics[slot.index]

    with torch.inference_mode():
        return template.target(*filled(template.args, known), **filled(template.kwargs, known))


def on_device(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Redirect an operator's `device` argument and its constants to the device."""
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

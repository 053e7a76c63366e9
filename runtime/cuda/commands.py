"""A program as commands for three streams: kernels, copies, and the events that keep the plan's order.

    compute   K0      W0 K1          K2 R1 ...         K  kernels of one op        W  wait for an event
    swap_in   C(0,1)  R0       ...      W1 C(2)        C  one joined copy          R  record an event
    swap_out     ... S(0) ...                          S  an activation's copy to the host

Swap-ins that are adjacent in host and device memory are joined into one copy, because each copy pays the link's latency
once. An op waits for the whole joined copy. Joining therefore never delays an op: a copy that might is kept smaller.

The plan's waits are issued unchanged: the plan already omits waits implied by lane order or by another wait. A joined
copy is one command, so a stream waits for it once. These waits have no counterpart in the plan:

- The first copy of a lane waits for the start of the inference (`FORK`), unless it waits for an op.
- `deallocate` waits for the tensor's last `copy_out`.
- `copy_back` waits for its `allocate`, which replaces the plan's waits for that swap-in.
- At the end, compute waits for the last copy of each lane, unless it has waited for that copy already.

Copies of residents and epilogues run between inferences and need no further waits: the executor makes each run wait for
the last such copies of its model. Staged copies are the same commands, issued by another thread.

One thread can issue the commands in their order: each record precedes its waits. Offloaded tensors are allocated and
deallocated in the compute stream's order, so that the allocator may reuse their bytes for later work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Literal

from cohabit.planner.plan import Drop, Lane, SwapIn, SwapOut
from cohabit.planner.profile import Link, Profile
from cohabit.runtime.binding.draft import ComputeStep, SwapStep
from cohabit.runtime.binding.program import Program

FORK = 0
"""Index of the event recorded at the start of an inference. The first copy of each copy lane waits for it, unless that
copy waits for an op."""

_LATENCY_FRACTION = 0.02
"""A copy has its target size once the link's latency is at most this fraction of its time."""
_LATE_DIVISOR = 4
"""Divisor of the target size for a copy that may delay an op: the op waits for all of it."""
_LEAST_TARGET_BYTES, _MOST_TARGET_BYTES = 2 << 20, 8 << 20
"""Limits of the target size, for any measured link."""
_TYPICAL_LINK = Link(3.2e-6, 52.5e9)
"""A typical GPU's link, for programs without a profile."""

LANES: tuple[Lane, ...] = ("compute", "swap_in", "swap_out")


Verb = Literal["compute", "copy", "copy_out", "copy_back", "deallocate", "allocate", "record", "wait"]
"""Effect of a command, and the sequence that its index refers to:

| verb | does | index into |
| --- | --- | --- |
| compute | runs the kernels of an op | `program.computes` |
| copy | copies parameters, joined or one, to the arena | `IssueSchedule.copies` |
| copy_out | copies an offloaded tensor to the host | `program.swap_outs` |
| copy_back | copies an offloaded tensor back | `program.swap_ins` |
| deallocate | releases an offloaded tensor's bytes | `program.offloaded` |
| allocate | allocates them again | `program.offloaded` |
| record, wait | order the streams | the inference's events |
"""


@dataclass(frozen=True, slots=True)
class Command:
    lane: Lane
    verb: Verb
    index: int


Commands = tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Swap-ins [first, last), which are adjacent in host and in device memory."""

    first: int
    last: int
    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class IssueSchedule:
    """One inference, and the copies between inferences. The epilogue starts after the outputs are ready."""

    inference: Commands
    epilogue: range
    """Indices into `copies`, as in `residents`."""
    residents: range
    copies: tuple[Copy, ...]
    events: int
    """Number of the inference's events."""


@dataclass(frozen=True, slots=True)
class Joining:
    """Rule for the size of joined copies on a device: they grow to `target_bytes`, and to at most twice that."""

    link: Link
    target_bytes: int

    @staticmethod
    def of(profile: Profile | None) -> "Joining":
        """Derive the size from the latency of the measured link."""
        link = _TYPICAL_LINK if profile is None else profile.swap_in
        nbytes = int(link.latency_s * link.bandwidth_bytes_per_s / _LATENCY_FRACTION)
        return Joining(link, min(max(nbytes, _LEAST_TARGET_BYTES), _MOST_TARGET_BYTES))

    @property
    def reserve_s(self) -> float:
        """Slack before an op's deadline, for one late preceding copy."""
        return self.link.seconds(self.target_bytes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times of an inference without joined copies, from its start. Without a profile, all copies are late."""

    ends_s: list[float]
    """By k: end of the first k compute steps."""
    arrivals_s: list[float]
    """End of each swap-in."""
    latest_s: list[float]
    """Latest end of each swap-in that delays no op, even if all later copies follow back to back."""

    @staticmethod
    def of(program: Program) -> "Forecast":
        profile, swap_ins = program.draft.profile, len(program.swap_ins)
        if profile is None:
            return Forecast([0.0] * (len(program.computes) + 1), [0.0] * swap_ins, [-inf] * swap_ins)
        tensors, slowdown = program.graph.tensors, profile.swap_slowdown
        copy_s = [profile.link_of(tensors[s.tensor]).seconds(s.nbytes) * slowdown for s in program.swap_ins]
        ends_s, arrivals_s, needed_s = [0.0], list[float](), [inf] * swap_ins
        awaited = 0
        steps: list[ComputeStep | SwapStep] = [*program.computes, *program.swap_ins]
        for step in sorted(steps, key=lambda s: s.step):
            if isinstance(step, SwapStep):
                begin_s = max(arrivals_s[-1] if arrivals_s else 0.0, ends_s[step.computes_before])
                arrivals_s.append(begin_s + copy_s[len(arrivals_s)])
                continue
            begin_s = max(ends_s[-1], arrivals_s[step.swap_ins_before - 1] if step.swap_ins_before else 0.0)
            for swap_in in range(awaited, step.swap_ins_before):
                needed_s[swap_in] = begin_s
            awaited = max(awaited, step.swap_ins_before)
            ends_s.append(begin_s + profile.op_seconds[step.op])
        latest_s = needed_s
        for n in reversed(range(swap_ins - 1)):
            latest_s[n] = min(latest_s[n], latest_s[n + 1] - copy_s[n + 1])
        return Forecast(ends_s, arrivals_s, latest_s)


def schedule(program: Program, *, join: bool = True) -> IssueSchedule:
    """Lower a program to commands. Copies that no op of the same run waits for go to the epilogue.

    `join`: whether the store can copy several segments at once.
    """
    joining = Joining.of(program.draft.profile) if join else None
    needed = max((c.swap_ins_before for c in program.computes), default=0)
    if program.constants:
        needed = max(needed, program.epilogue)
    needed = max(needed, program.last_copy_back)
    copies: list[Copy] = []
    inference, events = _commands(program, needed, joining, copies)
    in_inference = len(copies)
    copies.extend(joined(program.swap_ins[needed:], needed, joining))
    with_epilogue = len(copies)
    copies.extend(joined(program.residents, 0, joining))
    return IssueSchedule(
        inference,
        epilogue=range(in_inference, with_epilogue),
        residents=range(with_epilogue, len(copies)),
        copies=tuple(copies),
        events=events,
    )


@dataclass(slots=True, eq=False)
class _PlannedCommand:
    """A command, the index of its step in the plan, and the commands of other lanes that it waits for."""

    step: int
    command: Command
    waits: list["_PlannedCommand"] = field(default_factory=list)


def _commands(program: Program, end: int, joining: Joining | None, copies: list[Copy]) -> tuple[Commands, int]:
    """Return the commands of ops, swap-outs and the first `end` swap-ins, and the event count. Appends to `copies`."""
    planned = sorted(_planned_commands(program, end, joining, copies), key=lambda p: p.step)
    # A lane waits for each command once.
    awaited: dict[Lane, set[_PlannedCommand]] = {lane: set() for lane in LANES}
    for item in planned:
        before = awaited[item.command.lane]
        item.waits = [other for other in item.waits if other not in before]
        before.update(item.waits)
    # An event for each command that another one waits for.
    events = {p: n for n, p in enumerate((p for p in planned if any(p in a for a in awaited.values())), FORK + 1)}
    count = FORK + 1 + len(events)
    # Copy lanes whose first copy waits for nothing else wait for the inference's start.
    by_lane = {lane: [p for p in planned if p.command.lane == lane] for lane in LANES[1:]}
    early = [lane for lane, own in by_lane.items() if own and not own[0].waits]
    issued = [Command("compute", "record", FORK)] if early else []
    issued += [Command(lane, "wait", FORK) for lane in early]
    recorded: set[_PlannedCommand] = set()
    for item in planned:
        lane = item.command.lane
        assert recorded.issuperset(item.waits), "a plan waits for a later step"
        issued += [Command(lane, "wait", events[other]) for other in item.waits]
        issued.append(item.command)
        if item in events:
            issued.append(Command(lane, "record", events[item]))
            recorded.add(item)
    for lane, own in by_lane.items():  # a graph must end on one lane
        if own and own[-1] not in awaited["compute"]:
            issued += [Command(lane, "record", count), Command("compute", "wait", count)]
            count += 1
    return tuple(issued), count


def _planned_commands(
    program: Program, end: int, joining: Joining | None, copies: list[Copy]
) -> list[_PlannedCommand]:
    """Return commands lane by lane, the compute lane's first: a stable sort by step keeps them first in each step."""
    ops = [_PlannedCommand(c.step, Command("compute", "compute", n)) for n, c in enumerate(program.computes)]
    outs = [_PlannedCommand(s.step, Command("swap_out", "copy_out", n)) for n, s in enumerate(program.swap_outs)]
    changes = _allocations(program, outs)
    ins: list[_PlannedCommand] = []
    """Of each swap-in; those of a joined copy have the same one."""
    forecast = Forecast.of(program)
    for first, part in _split_by_destination(program.swap_ins[:end]):
        if part[0].offloaded is not None:
            at_step = part[0].step
            ins.append(_PlannedCommand(at_step, Command("swap_in", "copy_back", first), [changes[at_step]]))
            continue
        for copy in joined(part, first, joining, forecast):
            steps = program.swap_ins[copy.first : copy.last]
            waits = [
                *_last_of(ops, max(s.computes_before for s in steps)),
                *_last_of(outs, max(s.others_before for s in steps)),
            ]
            # As early as its waits allow: ops that need its first swap-in may precede the step of its last swap-in.
            at_step = max([steps[0].step, *(other.step for other in waits)])
            ins += [_PlannedCommand(at_step, Command("swap_in", "copy", len(copies)), waits)] * len(steps)
            copies.append(copy)
    for op, compute in zip(ops, program.computes, strict=True):
        op.waits = [*_last_of(ins, compute.swap_ins_before), *_last_of(outs, compute.swap_outs_before)]
    for out, step in zip(outs, program.swap_outs, strict=True):
        out.waits = [*_last_of(ops, step.computes_before), *_last_of(ins, step.others_before)]
    return [*ops, *changes.values(), *dict.fromkeys(ins), *outs]


def _last_of(lane: Sequence[_PlannedCommand], count: int) -> Sequence[_PlannedCommand]:
    """Return the last of the first `count` commands of a lane, if any."""
    return lane[count - 1 : count] if count else ()


def _split_by_destination(swap_ins: Sequence[SwapStep]) -> Iterator[tuple[int, Sequence[SwapStep]]]:
    """Yield consecutive copies to the arena together, and copies of offloaded tensors one by one.

    Each comes with the index of its first copy in `swap_ins`.
    """
    start = 0
    for is_offloaded, part in groupby(swap_ins, key=lambda s: s.offloaded is not None):
        steps = list(part)
        if is_offloaded:
            yield from ((start + n, [step]) for n, step in enumerate(steps))
        else:
            yield start, steps
        start += len(steps)


def _allocations(program: Program, outs: Sequence[_PlannedCommand]) -> dict[int, _PlannedCommand]:
    """Return the deallocations and allocations of offloaded tensors by step: their drops and swap-ins in the plan.

    Bytes are deallocated after the copy out. The copy that fills allocated bytes waits until the compute stream reaches
    the allocation: all earlier work on these bytes was issued to that stream before.
    """
    number = {t.spill.tensor: n for n, t in enumerate(program.offloaded)}
    frees = {t.spill.tensor: iter([i.frees_storage for i in t.spill.intervals]) for t in program.offloaded}
    copies_out = {s.step: out for s, out in zip(program.swap_outs, outs, strict=True)}
    copied_out: dict[int, _PlannedCommand] = {}
    changes: dict[int, _PlannedCommand] = {}
    for index, step in enumerate(program.plan.steps if number else ()):
        if isinstance(step, SwapOut):
            copied_out[step.tensor] = copies_out[index]
        elif isinstance(step, SwapIn) and step.tensor in number:
            changes[index] = _PlannedCommand(index, Command("compute", "allocate", number[step.tensor]))
        elif isinstance(step, Drop) and step.tensor in number and next(frees[step.tensor]):
            command = Command("compute", "deallocate", number[step.tensor])
            changes[index] = _PlannedCommand(index, command, [copied_out[step.tensor]])
    return changes


def joined(
    swap_ins: Sequence[SwapStep], start: int, joining: Joining | None, forecast: Forecast | None = None
) -> tuple[Copy, ...]:
    """Join small adjacent swap-ins. A joined copy waits for all ops that its swap-ins wait for.

    `start` is the index of the first of `swap_ins` in the program. With a forecast, a copy grows to `target_bytes` if
    it arrives in time for the first op that needs it. Otherwise it stays smaller, and does not include swap-ins that
    wait for a later op. Without a forecast, no op waits for these copies. Without `joining`, no copies are joined.
    """
    copies: list[Copy] = []
    latest = 0  # number of compute steps that the lane has waited for
    free_s = begin_s = 0.0  # when the link is free for the last copy, and when that copy begins
    if forecast is not None and start:
        free_s = forecast.arrivals_s[start - 1]
    for index, step in enumerate(swap_ins, start):
        later = step.computes_before > latest or step.others_before > 0
        latest = max(latest, step.computes_before)
        ready_s = 0.0 if forecast is None else forecast.ends_s[latest]
        last = copies[-1] if copies else None
        if last is not None and joining is not None and _continues(last, step):
            nbytes, target_bytes = last.nbytes + step.nbytes, joining.target_bytes
            if forecast is not None:
                end_s = max(free_s, ready_s) + joining.link.seconds(nbytes)
                if step.others_before or end_s + joining.reserve_s > forecast.latest_s[last.first]:
                    target_bytes = 0 if later else target_bytes // _LATE_DIVISOR
            if last.nbytes < target_bytes and nbytes <= 2 * target_bytes:
                copies[-1] = Copy(last.first, index + 1, last.segment, last.offset, nbytes)
                begin_s = max(free_s, ready_s)
                continue
        if last is not None and joining is not None:
            free_s = begin_s + joining.link.seconds(last.nbytes)
        begin_s = max(free_s, ready_s)
        copies.append(Copy(index, index + 1, step.tensor, step.offset, step.nbytes))
    return tuple(copies)


def _continues(copy: Copy, step: SwapStep) -> bool:
    """Whether a swap-in's bytes directly follow a copy's, in host and device memory."""
    return step.tensor == copy.segment + copy.last - copy.first and step.offset == copy.offset + copy.nbytes

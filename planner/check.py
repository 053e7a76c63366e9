"""Checks whether a plan may run. Shares no code with the simulator or any search.

The checker replays a plan in its total order. It checks tensors with an address per byte range. The others are
*counted*: it sums their bytes, including released ones that a pending step may still use. Lanes run concurrently: only
lane order and `after` edges guarantee that one step has ended when another starts. Each step therefore has a *clock*:
the number of steps of each lane that have certainly ended when it starts."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

from cohabit.planner.errors import FingerprintMismatch, InvalidPlan
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Plan, Region, SwapIn, SwapOut, lane_of
from cohabit.planner.profile import Profile

Clock = tuple[int, ...]
_LANES = ("compute", "swap_in", "swap_out")
_NEVER: Clock = (0, 0, 0)


def check(graph: Graph, profile: Profile | None, plan: Plan) -> None:
    """Check that `plan` may run. Raises InvalidPlan with one sentence per violation, or FingerprintMismatch."""
    if plan.graph != graph.fingerprint:
        raise FingerprintMismatch("plan", graph.fingerprint, plan.graph)
    if profile is not None and plan.profile != profile.fingerprint:
        raise FingerprintMismatch("plan", profile.fingerprint, plan.profile)
    violations = list(_unknown_names(graph, plan))
    if not violations:
        clocks, violations = _clocks(graph, plan)
        violations += _changes_out_of_order(graph, plan)
        violations += _numbers_out_of_order(graph, plan)
        violations += _Replay(graph, plan, clocks).violations()
    if violations:
        raise InvalidPlan(violations)


def _unknown_names(graph: Graph, plan: Plan) -> Iterator[str]:
    """Find ids that the graph does not have. The other checks require valid ids."""
    count = len(graph.tensors)
    for placement in plan.residents:
        if not 0 <= placement.tensor < count:
            yield f"tensor {placement.tensor} is a resident, but the graph has only {count} tensors"
    for index, step in enumerate(plan.steps):
        if not isinstance(step, Compute):
            if not 0 <= step.tensor < count:
                yield f"step {index} names tensor {step.tensor}, but the graph has only {count} tensors"
        elif not 0 <= step.op < len(graph.ops):
            yield f"step {index} names op {step.op}, but the graph has only {len(graph.ops)} ops"


def _changes_out_of_order(graph: Graph, plan: Plan) -> Iterator[str]:
    """Find ops that run after a different number of in-place changes of a tensor than in the graph's order."""
    changed = {i for op in graph.ops for i in op.mutates}
    changes, state = Counter[int](), []  # per op and tensor, changes up to and including the op
    for op in graph.ops:
        changes.update(set(op.mutates))
        state.append({i: changes[i] for i in changed.intersection(op.touched)})
    seen, wrong = Counter[int](), dict[int, str]()
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            seen.update(set(graph.ops[step.op].mutates))
            for i in [i for i, times in state[step.op].items() if times != seen[i] and i not in wrong]:
                wrong[i] = (
                    f"{_name(graph, plan, index)}: {graph.tensors[i].name} has been changed in place {seen[i]} times,"
                    f" but {state[step.op][i]} times in the graph's order"
                )
    yield from (wrong[i] for i in sorted(wrong))


def _numbers_out_of_order(graph: Graph, plan: Plan) -> Iterator[str]:
    """Find ops that run before an earlier op that reads a number out of a tensor: it may be their argument."""
    missing = [k for k, op in enumerate(graph.ops) if not op.writes and not op.mutates]
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute) and missing:
            if step.op in missing:
                missing.remove(step.op)
            for k in [k for k in missing if k < step.op]:
                yield f"{_name(graph, plan, index)} runs before {graph.ops[k].name}, whose number it may take"
                missing.remove(k)


def _clocks(graph: Graph, plan: Plan) -> tuple[list[Clock], list[str]]:
    """Return the clock of each step, and the violations in the steps' waits."""
    before: list[Clock] = []
    after: list[Clock] = []  # the same, once the step itself has ended
    latest: dict[str, Clock] = {}
    violations = []
    for index, step in enumerate(plan.steps):
        lane = lane_of(step)
        if lane is None:
            before.append(_NEVER)
            after.append(_NEVER)
            continue
        clock = latest.get(lane, _NEVER)
        assert not isinstance(step, Drop)
        for earlier in step.after:
            if not 0 <= earlier < index:
                violations.append(f"{_name(graph, plan, index)} waits for step {earlier}, which is not before it")
            elif lane_of(plan.steps[earlier]) is None:
                violations.append(
                    f"{_name(graph, plan, index)} waits for step {earlier}, a drop, which no lane runs"
                )
            else:
                clock = _latest(clock, after[earlier])
        before.append(clock)
        own = _LANES.index(lane)
        latest[lane] = tuple(n + (i == own) for i, n in enumerate(clock))
        after.append(latest[lane])
    return before, violations


def _latest(a: Clock, b: Clock) -> Clock:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])


def _name(graph: Graph, plan: Plan, index: int) -> str:
    step = plan.steps[index]
    if isinstance(step, Compute):
        return f"step {index} (compute {graph.ops[step.op].name})"
    verb = {SwapIn: "swap-in", SwapOut: "swap-out", Drop: "drop"}[type(step)]
    return f"step {index} ({verb} of {graph.tensors[step.tensor].name})"


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes [start, end) of a region, and the clock that must have passed before they are overwritten."""

    region: Region
    start: int
    end: int
    what: str
    accessed: Clock

    def overlaps(self, other: "_Range") -> bool:
        """Whether the ranges share a byte; an empty range overlaps nothing."""
        return self.region == other.region and max(self.start, other.start) < min(self.end, other.end)


_where = attrgetter("region", "start")


class _Ranges:
    """Ranges sorted by address, for fast overlap queries."""

    def __init__(self) -> None:
        self._sorted: list[_Range] = []
        self._longest = 0

    def add(self, new: _Range) -> None:
        self._longest = max(self._longest, new.end - new.start)
        insort(self._sorted, new, key=_where)

    def remove(self, old: _Range) -> None:
        del self._sorted[self._sorted.index(old, bisect_left(self._sorted, _where(old), key=_where))]

    def overlapping(self, place: _Range) -> list[_Range]:
        first = bisect_left(self._sorted, (place.region, place.start - self._longest), key=_where)
        end = bisect_left(self._sorted, (place.region, place.end), key=_where)
        return [r for r in self._sorted[first:end] if place.overlaps(r)]


@dataclass(slots=True)
class _Copy:
    """A tensor in memory."""

    place: _Range | None
    """None for counted tensors."""
    address: Address | None
    written: Clock
    """Passed once the tensor has arrived."""
    accessed: Clock
    """Passed once the tensor has arrived and all its readers so far have ended."""


@dataclass
class _Replay:
    """Replays the steps in order, tracking present and past contents of memory, and violations."""

    graph: Graph
    plan: Plan
    clocks: list[Clock]
    live: dict[int, _Copy] = field(default_factory=dict)
    present: _Ranges = field(default_factory=_Ranges)
    past: _Ranges = field(default_factory=_Ranges)
    counted_bytes: int = 0
    """Bytes in memory without an address."""
    released: tuple[list[tuple[int, Clock]], list[tuple[int, Clock]]] = field(default_factory=lambda: ([], []))
    """For the compute and the swap-in lane: released counted bytes that may still be in use when the lane's next step
    starts. Each entry has the clock that must have passed before they are reused."""
    dropped: dict[int, Clock] = field(default_factory=dict)
    """Dropped counted tensors, each with the clock at which all users of its last copy have ended."""
    on_host: dict[int, Clock] = field(default_factory=dict)
    """Swapped-out tensors, each with the clock at which its host copy is complete."""
    residents: frozenset[int] = frozenset()
    unread: set[int] = field(default_factory=set)
    """Residents that no op has read yet: the previous inference may still be restoring them."""
    streamed: list[tuple[str, Clock]] = field(default_factory=list)
    """Swap-ins of non-residents, with the clock at which each has ended."""
    unsaved: set[int] = field(default_factory=set)
    """State in memory that differs from its host copy."""
    answered: Clock = _NEVER
    """Passed once the last op has ended."""
    issued: list[int] = field(default_factory=lambda: [0, 0, 0])
    messages: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        self._start()
        for index, step in enumerate(self.plan.steps):
            match step:
                case Compute():
                    self._compute(index, step)
                case SwapIn():
                    self._swap_in(index, step)
                case SwapOut():
                    self._swap_out(index, step)
                case Drop():
                    self._drop(index, step.tensor)
        self._finish()
        return self.messages

    def _start(self) -> None:
        tensors, memory, pool = self.graph.tensors, self.plan.memory, self.plan.pool_bytes
        if min(memory.partition_bytes, pool) < 0 or pool > memory.workspace_bytes:
            self.messages.append(
                f"the partition has {memory.partition_bytes} bytes, the workspace {memory.workspace_bytes}, and the"
                f" pool {pool}; none may be negative, and the pool must fit into the workspace"
            )
        self.residents = frozenset(placement.tensor for placement in self.plan.residents)
        self.unread = set(self.residents)
        for placement in self.plan.residents:
            tensor = tensors[placement.tensor]
            if not tensor.is_weight:
                self.messages.append(f"{tensor.name} is a resident, but neither a parameter nor state")
            if tensor.kind == "state":
                self.unsaved.add(placement.tensor)  # the previous inference changed it
            if placement.address is not None and placement.address.region != "partition":
                self.messages.append(f"resident {tensor.name} is not in the partition")
            if placement.address is None and tensor.nbytes > memory.lasting_pool_bytes:
                self.messages.append(
                    f"resident {tensor.name} has no address, but the workspace does not last: it needs one in the"
                    " partition"
                )
        for i in self.graph.inputs:
            self._bring("start", i, None, _NEVER, _NEVER)
        for placement in self.plan.residents:
            self._bring("start", placement.tensor, placement.address, _NEVER, _NEVER)
        self._count("start", 0, _NEVER, 1)

    def _compute(self, index: int, step: Compute) -> None:
        op, name, before = self.graph.ops[step.op], _name(self.graph, self.plan, index), self.clocks[index]
        ended = self._issue(0)
        for i in op.reads:
            self._read(name, i, before, ended)
        self.unread.difference_update(op.reads)
        for i in op.mutates:
            self._change(name, i, before, ended)
        for i in op.writes:
            self._bring(name, i, None, before, ended)
        if op.scratch_bytes or any(self.graph.tensors[i].nbytes for i in op.writes):
            self._count(name, op.aligned_scratch_bytes, before, 0)
        self._uncount(op.aligned_scratch_bytes, ended)
        if index + 1 == self.plan.epilogue_start:
            self._answer(_latest(before, ended))

    def _swap_in(self, index: int, step: SwapIn) -> None:
        tensor, before = self.graph.tensors[step.tensor], self.clocks[index]
        name = _name(self.graph, self.plan, index)
        ended = self._issue(1)
        if tensor.kind != "parameter":
            saved = self.on_host.get(step.tensor, _NEVER if tensor.kind == "state" else None)
            if saved is None:
                self.messages.append(f"{name}: the {tensor.kind} was never swapped out")
            elif not _passed(saved, before):
                self.messages.append(f"{name} does not wait for the swap-out of {tensor.name}")
        if step.address is None and not _passed(self.dropped.get(step.tensor, _NEVER), before):
            self.messages.append(f"{name} reuses the storage of {tensor.name} without waiting for its last users")
        self._bring(name, step.tensor, step.address, before, ended)
        if step.tensor not in self.residents:
            self.streamed.append((name, ended))
        if step.address is None and tensor.nbytes:
            self._count(name, 0, before, 1)

    def _swap_out(self, index: int, step: SwapOut) -> None:
        tensor, before = self.graph.tensors[step.tensor], self.clocks[index]
        name = _name(self.graph, self.plan, index)
        ended = self._issue(2)
        if tensor.kind == "parameter":
            self.messages.append(f"{name}: a parameter has a host copy at all times; drop it instead")
        self._read(name, step.tensor, before, ended)
        self.on_host[step.tensor] = ended
        self.unsaved.discard(step.tensor)

    def _drop(self, index: int, tensor: int) -> None:
        copy = self.live.pop(tensor, None)
        if copy is None:
            self.messages.append(f"{_name(self.graph, self.plan, index)}: the tensor is not in memory")
        elif copy.place is not None:
            self.present.remove(copy.place)
            self._retire(replace(copy.place, accessed=copy.accessed))
        else:
            self.dropped[tensor] = copy.accessed
            self._uncount(self.graph.tensors[tensor].aligned_bytes, copy.accessed)
            if tensor in self.unread:
                self.messages.append(
                    f"{_name(self.graph, self.plan, index)}: no op has read the tensor yet, so the previous inference"
                    " may still be restoring it"
                )
        if tensor in self.unsaved:
            self.messages.append(f"{_name(self.graph, self.plan, index)}: its changes are not in the host store")

    def _answer(self, ended: Clock) -> None:
        """Check output parameters as the last op ends. They need not stay longer, since the host store has them."""
        self.answered = ended
        for i in self.graph.outputs:
            tensor, copy = self.graph.tensors[i], self.live.get(i)
            if tensor.kind == "parameter" and (copy is None or not _passed(copy.written, ended)):
                self.messages.append(f"output {tensor.name} is not in memory when the last op ends")

    def _finish(self) -> None:
        tensors = self.graph.tensors
        issued = {s.op for s in self.plan.steps if isinstance(s, Compute)}
        self.messages += (f"op {op.name} never runs" for k, op in enumerate(self.graph.ops) if k not in issued)
        for i in self.graph.outputs:
            copy = self.live.get(i)
            if tensors[i].kind == "parameter" and issued:
                continue
            if copy is None:
                self.messages.append(f"output {tensors[i].name} is not in memory at the end")
            elif issued and not _passed(copy.written, self.answered):
                self.messages.append(f"output {tensors[i].name} may arrive after the last op has ended")
        for name, ended in self.streamed if issued else ():
            if not _passed(ended, self.answered):
                self.messages.append(f"{name} may last into the next inference, which counts its bytes as free")
        for i in sorted(self.unsaved - self.residents):
            self.messages.append(f"{tensors[i].name} was changed, but is neither swapped out nor a resident")
        for resident in self.plan.residents:
            copy = self.live.get(resident.tensor)
            if copy is None:
                self.messages.append(f"resident {tensors[resident.tensor].name} is not in memory at the end")
            elif copy.address != resident.address:
                self.messages.append(
                    f"resident {tensors[resident.tensor].name} ends at {_show(copy.address)},"
                    f" but started at {_show(resident.address)}"
                )

    def _issue(self, lane: int) -> Clock:
        """Count a step on its lane. Returns the clock that has passed once the step has ended."""
        self.issued[lane] += 1
        return tuple(n if i == lane else 0 for i, n in enumerate(self.issued))

    def _read(self, name: str, tensor: int, before: Clock, ended: Clock) -> None:
        copy = self.live.get(tensor)
        if copy is None:
            self.messages.append(f"{name} reads {self.graph.tensors[tensor].name}, which is not in memory")
            return
        if not _passed(copy.written, before):
            self.messages.append(f"{name} does not wait for {self.graph.tensors[tensor].name} to arrive")
        copy.accessed = _latest(copy.accessed, ended)

    def _change(self, name: str, tensor: int, before: Clock, ended: Clock) -> None:
        """Record an in-place change: a pending swap-out must have ended, the host copy becomes stale, and later readers
        must wait for the change.
        """
        if (copy := self.live.get(tensor)) is not None:
            copy.written = _latest(copy.written, ended)
        if self.graph.tensors[tensor].kind == "state":
            self.unsaved.add(tensor)
        saved = self.on_host.pop(tensor, None)
        if saved is not None and not _passed(saved, before):
            self.messages.append(f"{name} changes {self.graph.tensors[tensor].name} before its swap-out has ended")

    def _bring(self, name: str, tensor: int, address: Address | None, before: Clock, ended: Clock) -> None:
        """Put a tensor in memory; `before` and `ended` are the clocks of the step that writes it."""
        what = self.graph.tensors[tensor]
        if tensor in self.live:
            self.messages.append(f"{name}: {what.name} is in memory already")
            return
        if address is not None and not what.is_weight:
            self.messages.append(f"{name}: {what.name} has an address, but is neither a parameter nor state")
            address = None
        place = None
        if address is None:
            self.counted_bytes += what.aligned_bytes
        else:
            place = self._range(name, what.name, address, what.nbytes, what.alignment, ended)
            self._claim(name, place, before)
            self.present.add(place)
        self.live[tensor] = _Copy(place, address, ended, ended)

    def _count(self, name: str, scratch_bytes: int, before: Clock, lane: int) -> None:
        """Check that the pool suffices once a step of a lane has allocated its bytes."""
        self.counted_bytes += scratch_bytes
        pending = self.released[lane]
        pending[:] = [(nbytes, clock) for nbytes, clock in pending if not _passed(clock, before)]
        unfinished_bytes = sum(nbytes for nbytes, _ in pending)
        if self.counted_bytes + unfinished_bytes > self.plan.pool_bytes:
            self.messages.append(
                f"{name}: tensors without an address take {self.counted_bytes} bytes, and {unfinished_bytes} released"
                f" bytes may still be in use; the pool has only {self.plan.pool_bytes}"
            )

    def _uncount(self, nbytes: int, accessed: Clock) -> None:
        """Release counted bytes; their last users have ended once `accessed` has passed."""
        self.counted_bytes -= nbytes
        if nbytes:
            for pending in self.released:
                pending.append((nbytes, accessed))

    def _range(
        self, name: str, what: str, address: Address, nbytes: int, alignment: int, accessed: Clock
    ) -> _Range:
        memory = self.plan.memory
        limit = memory.partition_bytes if address.region == "partition" else memory.workspace_bytes
        end = address.offset + nbytes
        if nbytes and address.region == "workspace" and address.offset < self.plan.pool_bytes:
            self.messages.append(
                f"{name}: {what} at {_show(address)} lies in the pool of {self.plan.pool_bytes} bytes"
            )
        if address.offset < 0 or end > limit:
            self.messages.append(
                f"{name}: {what} at {_show(address)} ends at {end}, but the {address.region} has {limit} bytes"
            )
        if address.offset % alignment:
            self.messages.append(f"{name}: {what} at {_show(address)} is not aligned to {alignment} bytes")
        return _Range(address.region, address.offset, end, what, accessed)

    def _claim(self, name: str, place: _Range, before: Clock) -> None:
        """Check bytes before a write: they are unoccupied, and accesses to their past contents have ended."""
        for other in self.present.overlapping(place):
            self.messages.append(
                f"{name}: {place.what} at {place.region} [{place.start}, {place.end}) overlaps"
                f" {other.what} at [{other.start}, {other.end})"
            )
        for old in self.past.overlapping(place):
            if not _passed(old.accessed, before):
                self.messages.append(
                    f"{name} overwrites {old.what} at {place.region} [{old.start}, {old.end}) without waiting for"
                    f" {_unfinished(old.accessed, before)}"
                )

    def _retire(self, gone: _Range) -> None:
        """Record the last accesses of freed bytes.

        Older records of these bytes are removed: their accesses ended before those of `gone` began.
        """
        pieces = [gone]
        for old in self.past.overlapping(gone):
            self.past.remove(old)
            pieces += replace(old, end=gone.start), replace(old, start=gone.end)
        for piece in (p for p in pieces if p.start < p.end):
            self.past.add(piece)


def _passed(clock: Clock, now: Clock) -> bool:
    return clock[0] <= now[0] and clock[1] <= now[1] and clock[2] <= now[2]


def _unfinished(clock: Clock, now: Clock) -> str:
    missing = [(lane, n) for lane, n, passed in zip(_LANES, clock, now, strict=True) if n > passed]
    return " and ".join(f"step {n} of the {lane} lane" for lane, n in missing)


def _show(address: Address | None) -> str:
    return "no address" if address is None else f"{address.region}+{address.offset}"

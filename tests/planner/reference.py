"""Slow references, written independently: a simulator with exact arithmetic, and counts of bytes in memory."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from cohabit.planner.schedule.sequence import Action, ActionKind

from cohabit.planner.graph import Graph, TensorKind
from cohabit.planner.plan import Compute, Drop, Plan, SwapIn, SwapOut, lane_of
from cohabit.planner.profile import Profile

ALL_KINDS: tuple[TensorKind, ...] = ("parameter", "state", "input", "activation")


@dataclass(eq=False)
class Job:
    lane: str
    left: Fraction
    waits: list["Job"] = field(default_factory=list)
    end: Fraction | None = None


def simulate_exactly(
    graph: Graph, plan: Plan, profile: Profile, inferences: int
) -> tuple[list[Fraction], list[Fraction]]:
    """Ends of the first inference's steps, in step order, and the end of every inference's last op."""
    runs: list[list[Job]] = []
    for _ in range(inferences):
        runs.append(_jobs(graph, plan, profile, runs[-1] if runs else None))
    pending = [job for run in runs for job in run]
    now = Fraction(0)
    while pending:
        running = []
        for lane in ("compute", "swap_in", "swap_out"):
            first = next((job for job in pending if job.lane == lane), None)
            if first is not None and all(w.end is not None for w in first.waits):
                running.append(first)
        busy = {job.lane for job in running}
        contended = "compute" in busy and len(busy) > 1
        slow = {job: Fraction(_slowdown(profile, job)) if contended else Fraction(1) for job in running}
        passed = min(job.left * slow[job] for job in running)
        now += passed
        for job in running:
            job.left -= passed / slow[job]
            if job.left == 0:
                job.end = now
                pending.remove(job)
    ends = [job.end for job in runs[0] if job.end is not None]
    last_ops = [[job for job in run if job.lane == "compute"][-1].end for run in runs]
    return ends, [end for end in last_ops if end is not None]


def _slowdown(profile: Profile, job: Job) -> float:
    return profile.compute_slowdown if job.lane == "compute" else profile.swap_slowdown


def _jobs(graph: Graph, plan: Plan, profile: Profile, previous: list[Job] | None) -> list[Job]:
    jobs: dict[int, Job] = {}
    indices = [i for i, step in enumerate(plan.steps) if lane_of(step) is not None]
    before = dict(zip(indices, previous, strict=True)) if previous else {}
    last_op = [job for job in before.values() if job.lane == "compute"][-1:]
    last_out = [job for job in before.values() if job.lane == "swap_out"][-1:]
    residents = {p.tensor for p in plan.residents}
    for i in indices:
        step = plan.steps[i]
        if isinstance(step, Compute):
            touched = {*graph.ops[step.op].reads, *_overwritten(graph, plan, i)}
            restored = [
                before[j]
                for j, other in enumerate(plan.steps)
                if isinstance(other, SwapIn) and other.tensor in residents and other.tensor in touched
                if before
            ]
            jobs[i] = Job("compute", Fraction(profile.op_seconds[step.op]), [*restored, *last_out])
        else:
            link = profile.swap_in if isinstance(step, SwapIn) else profile.swap_out
            lane = lane_of(step)
            assert lane is not None
            jobs[i] = Job(lane, Fraction(link.seconds(graph.tensors[step.tensor].nbytes)), [*last_op, *last_out])
        jobs[i].waits += (jobs[j] for j in step.after)
    return list(jobs.values())


def _overwritten(graph: Graph, plan: Plan, at: int) -> set[int]:
    """Residents that are dropped before any op reads them, and whose bytes a compute step then writes."""
    step = plan.steps[at]
    assert isinstance(step, Compute)
    op = graph.ops[step.op]
    writes = [(address, graph.tensors[t].nbytes) for t, address in zip(op.writes, step.outputs, strict=True)]
    writes += [(step.scratch, op.scratch_bytes)] if step.scratch is not None else []
    found = set()
    for t, home in ((p.tensor, p.address) for p in plan.residents):
        drops = [i for i, s in enumerate(plan.steps) if isinstance(s, Drop) and s.tensor == t]
        reads = [i for i, s in enumerate(plan.steps) if isinstance(s, Compute) and t in graph.ops[s.op].reads]
        given_up = drops and drops[0] < at and not any(i < drops[0] for i in reads)
        end = home.offset + graph.tensors[t].nbytes
        meets = (a.region == home.region and a.offset < end and home.offset < a.offset + n for a, n in writes)
        if given_up and any(meets):
            found.add(t)
    return found


def live_bytes(graph: Graph, plan: Plan, kinds: Sequence[TensorKind] = ALL_KINDS) -> list[int]:
    """Bytes of tensors in memory after each step, partition and workspace together. Assumes a checked plan."""
    live = {p.tensor for p in (*plan.inputs, *plan.residents)}
    counted = [t.nbytes if t.kind in kinds else 0 for t in graph.tensors]
    total = sum(counted[i] for i in live)
    after_step = []
    for step in plan.steps:
        match step:
            case Compute():
                total += sum(counted[i] for i in graph.ops[step.op].writes)
            case SwapIn():
                total += counted[step.tensor]
            case Drop():
                total -= counted[step.tensor]
            case SwapOut():
                pass
        after_step.append(total)
    return after_step


def peak_bytes(graph: Graph, plan: Plan, kinds: Sequence[TensorKind] = ALL_KINDS) -> int:
    """Most bytes in memory at once, scratch included. Assumes a checked plan."""
    held = {p.tensor for p in (*plan.inputs, *plan.residents)}
    peak = sum(graph.tensors[i].nbytes for i in held if graph.tensors[i].kind in kinds)
    for step, total in zip(plan.steps, live_bytes(graph, plan, kinds), strict=True):
        scratch = graph.ops[step.op].scratch_bytes if isinstance(step, Compute) else 0
        peak = max(peak, total + scratch)
    return peak


def sequence_peak_bytes(graph: Graph, actions: Sequence[Action], residents: Collection[int]) -> int:
    """Most bytes in memory at once, scratch included, fragmentation not."""
    return max(sequence_held_bytes(graph, actions, residents), default=0)


def sequence_held_bytes(graph: Graph, actions: Sequence[Action], residents: Collection[int]) -> list[int]:
    """Bytes in memory during each action, scratch included."""
    size = [t.nbytes for t in graph.tensors]
    held = sum(size[t] for t in (*graph.inputs, *residents))
    found = []
    for action in actions:
        scratch = 0
        match action.verb:
            case ActionKind.COMPUTE:
                held += sum(size[t] for t in graph.ops[action.what].writes)
                scratch = graph.ops[action.what].scratch_bytes
            case ActionKind.SWAP_IN:
                held += size[action.what]
        found.append(held + scratch)
        if action.verb is ActionKind.DROP:
            held -= size[action.what]
    return found

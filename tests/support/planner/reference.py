"""Slow references, written independently: a simulator with exact arithmetic, and counts of bytes in memory."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from cohabit.planner.graph import Graph, TensorKind
from cohabit.planner.plan import Compute, Drop, Plan, SwapIn, SwapOut, lane_of
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN

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
            reads = graph.ops[step.op].reads
            restored = [
                before[j]
                for j, other in enumerate(plan.steps)
                if isinstance(other, SwapIn) and other.tensor in residents and other.tensor in reads
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


def aligned_bytes(graph: Graph) -> list[int]:
    """Bytes that each tensor takes where it is counted."""
    return [-(-t.nbytes // t.alignment) * t.alignment for t in graph.tensors]


def aligned_scratch_bytes(graph: Graph, op: int) -> int:
    return -(-graph.ops[op].scratch_bytes // 256) * 256


def live_bytes(
    graph: Graph, plan: Plan, kinds: Sequence[TensorKind] = ALL_KINDS, *, aligned: bool = True
) -> list[int]:
    """Bytes of tensors in memory after each step, partition and workspace together. Assumes a checked plan."""
    live = {*graph.inputs, *(p.tensor for p in plan.residents)}
    sizes = aligned_bytes(graph) if aligned else [t.nbytes for t in graph.tensors]
    counted = [n if t.kind in kinds else 0 for n, t in zip(sizes, graph.tensors, strict=True)]
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
    held = {*graph.inputs, *(p.tensor for p in plan.residents)}
    nbytes = aligned_bytes(graph)
    peak = sum(nbytes[i] for i in held if graph.tensors[i].kind in kinds)
    for step, total in zip(plan.steps, live_bytes(graph, plan, kinds), strict=True):
        scratch = aligned_scratch_bytes(graph, step.op) if isinstance(step, Compute) else 0
        peak = max(peak, total + scratch)
    return peak


def sequence_peak_bytes(graph: Graph, actions: Sequence[tuple[int, int]], residents: Collection[int]) -> int:
    """Most bytes in memory at once, scratch included, where everything is counted."""
    size = aligned_bytes(graph)
    held = sum(size[t] for t in (*graph.inputs, *residents))
    most = 0
    for verb, what in actions:
        scratch = 0
        if verb == COMPUTE:
            held += sum(size[t] for t in graph.ops[what].writes)
            scratch = aligned_scratch_bytes(graph, what)
        elif verb == SWAP_IN:
            held += size[what]
        most = max(most, held + scratch)
        if verb == DROP:
            held -= size[what]
    return most

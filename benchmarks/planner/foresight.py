"""Foresight: copies of the next request that begin while this one computes, simulated.

    python -m benchmarks.planner.foresight --record

Requests for a device's models run back to back. Today, a plan's copies begin with its first op. With foresight, those
that wait for no op begin as soon as the plan before has made its last copy, and no longer reads the bytes that they
overwrite. Compute and copies slow each other as in `cohabit.planner.schedule.simulate`.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.planner.cache import graph_parser_of, in_processes
from benchmarks.planner.models import NETWORKS, inference_graph
from benchmarks.planner.searchers import DEVICES
from benchmarks.record import markdown_table, publish
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan, SwapIn
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.problem import ModelDemand

SHARES = (0.25, 0.5)
"""Of all weights."""
REQUESTS = 300


@dataclass(slots=True)
class _Op:
    seconds: float
    copies_before: int


@dataclass(slots=True)
class _Copy:
    seconds: float
    ops_before: int
    start: int
    """First byte that it overwrites in the workspace; -1 in the partition, where no other model has bytes."""
    end: int
    last_read: int = 0
    """Ops of its own plan until these bytes are read for the last time."""


@dataclass(slots=True)
class _Planned:
    """A plan as the simulation needs it."""

    pool_bytes: int
    slowdowns: tuple[float, float]
    """Of an op, and of a copy, while both run."""
    ops: list[_Op] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)

    @property
    def ahead(self) -> int:
        """Copies before the first one that waits for an op."""
        return next((n for n, copy in enumerate(self.copies) if copy.ops_before), len(self.copies))

    def ops_until_free(self, copy: _Copy) -> int:
        """Ops of this plan after which another plan's copy may overwrite its bytes."""
        if copy.start < 0 or copy.start < self.pool_bytes:
            return len(self.ops)
        return max((c.last_read for c in self.copies if c.start < copy.end and copy.start < c.end), default=0)


def planned(graph: Graph, profile: Profile, plan: Plan) -> _Planned:
    result = _Planned(plan.pool_bytes, (profile.compute_slowdown, profile.swap_slowdown))
    done: list[tuple[int, int]] = []  # ops and copies up to each step
    held: dict[int, _Copy] = {}
    for step in plan.steps:
        after = [done[earlier] for earlier in step.after] if isinstance(step, Compute | SwapIn) else []
        if isinstance(step, Compute):
            copies = [n for e, (_, n) in zip(step.after, after, strict=True) if isinstance(plan.steps[e], SwapIn)]
            result.ops.append(_Op(profile.op_seconds[step.op], max(copies, default=0)))
            for tensor in graph.ops[step.op].touched:
                if tensor in held:
                    held[tensor].last_read = len(result.ops)
        elif isinstance(step, SwapIn):
            ops = [n for e, (n, _) in zip(step.after, after, strict=True) if isinstance(plan.steps[e], Compute)]
            tensor, address = graph.tensors[step.tensor], step.address
            assert address is not None, "parameters have addresses in served plans"
            start = address.offset if address.region == "workspace" else -1
            copy = _Copy(profile.swap_in_seconds(tensor), max(ops, default=0), start, start + tensor.aligned_bytes)
            held[step.tensor] = copy
            result.copies.append(copy)
        done.append((len(result.ops), len(result.copies)))
    return result


def seconds_of(requests: Sequence[_Planned], *, foresight: bool) -> float:
    """Return when the last op of requests that run back to back ends."""
    ops: list[tuple[_Op, int, _Planned]] = []
    copies: list[tuple[_Copy, int, _Planned]] = []
    before: _Planned | None = None
    for request in requests:
        first_op, first_copy = len(ops), len(copies)
        for n, copy in enumerate(request.copies):
            due = first_op + copy.ops_before
            if foresight and before is not None and n < request.ahead:
                due = first_op - len(before.ops) + before.ops_until_free(copy)
            copies.append((copy, due, request))
        ops += [(op, first_copy + op.copies_before if op.copies_before else 0, request) for op in request.ops]
        before = request
    now, op, copy = 0.0, 0, 0
    left: list[float | None] = [None, None]  # seconds left of the op and of the copy that run
    while op < len(ops):
        if left[0] is None and copy >= ops[op][1]:
            left[0] = ops[op][0].seconds
        if left[1] is None and copy < len(copies) and op >= copies[copy][1]:
            left[1] = copies[copy][0].seconds
        both = left[0] is not None and left[1] is not None
        slowdowns = ops[op][2].slowdowns if both else (1.0, 1.0)
        rests = [math.inf if rest is None else rest * by for rest, by in zip(left, slowdowns, strict=True)]
        passed = min(rests)
        assert passed < math.inf, "neither lane can go on"
        now += passed
        ended = rests.index(passed)
        other = left[1 - ended]
        left[ended], left[1 - ended] = None, None if other is None else other - passed / slowdowns[1 - ended]
        op, copy = (op + 1, copy) if ended == 0 else (op, copy + 1)
    return now


def measured(device: str, share: float, cache: Path | None) -> tuple[float, float, float]:
    """Return milliseconds per request with everything resident, of today's plans, and with foresight."""
    demands = []
    for network in NETWORKS:
        graph, work = inference_graph(network, 1, cache)
        demands.append(ModelDemand(network, {Bucket(1): graph}, {Bucket(1): DEVICES[device](graph, work)}))
    division = divide(demands, int(share * sum(d.graphs[Bucket(1)].parameter_bytes for d in demands)))
    plans = [
        planned(demand.graphs[Bucket(1)], demand.profiles[Bucket(1)], plan_model(demand, memory)[Bucket(1)])
        for demand, memory in zip(demands, division.memories, strict=True)
    ]
    chosen = np.random.default_rng(0).integers(len(plans), size=REQUESTS)
    requests = [plans[n] for n in chosen]
    resident = sum(op.seconds for request in requests for op in request.ops)
    each = resident, seconds_of(requests, foresight=False), seconds_of(requests, foresight=True)
    return tuple(1e3 * seconds / REQUESTS for seconds in each)  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.foresight", __doc__)
    parser.add_argument("--processes", type=int, default=2, help="searches at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    for network in NETWORKS:
        inference_graph(network, 1, options.cache)
    cells = [(device, share) for device in DEVICES for share in SHARES]
    found = in_processes(measured, [(*cell, options.cache) for cell in cells], options.processes)
    rows = [
        [f"{device}, {share:.0%}", f"{resident:.2f}", f"{today:.2f}", f"{ahead:.2f}", f"{ahead / today:.3f}"]
        for (device, share), (resident, today, ahead) in zip(cells, found, strict=True)
    ]
    header = ["device, share of the weights", "resident, ms", "today, ms", "with foresight, ms", "ratio"]
    publish(options, "Foresight across requests, simulated", [ABOUT, markdown_table(header, rows)])
    return 0


ABOUT = f"""**Simulated**: {REQUESTS} requests for seven networks, drawn evenly, run back to back at batch 1;
milliseconds per request. Op times are rooflines (`benchmarks/planner/profiles.py`). Memory is divided and planned as
for a server. *With foresight*, a plan's first copies, which wait for none of its ops, begin during the request before.
"""


if __name__ == "__main__":
    sys.exit(main())

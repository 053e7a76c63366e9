"""Predicts the times of a graph's ops on a device from profiles of other graphs there (TENSILE, section IV-A).

Theirs is a network of four layers per operator, on the dimensions of its inputs and its parameters. Here it is a
regression per kind of op: seconds per byte that it reads or writes, and per multiplication, above what the quickest ops
take, whose work is nothing. A graph has sizes and no shapes, so multiplications are the square root of the product of
the sizes, in elements, of the three largest tensors: exact for a product of matrices, and too few by the width of its
kernel for a convolution.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from scipy.optimize import nnls

from cohabit.planner.arrays import Floats
from cohabit.planner.graph import Graph, Op
from cohabit.planner.profile import Link, Profile

LEAST_OPS: Final = 6
"""Kinds with fewer ops in the known profiles take as long per byte as ops of all kinds together."""
QUICKEST: Final = 0.05
"""Share of ops that take no longer than it takes to issue one."""
EXPLAINED: Final = 0.5
"""Share of the error by bytes alone that may be left where multiplications count."""
_ELEMENT_BYTES: Final = 4
_LEAST_S: Final = 1e-6
"""Shorter times differ by what the clock says."""


def predicted(graph: Graph, known: Sequence[tuple[Graph, Profile]]) -> Profile:
    """Return the profile of a graph that the device of the known profiles, at least one, would have."""
    work: defaultdict[str, list[list[float]]] = defaultdict(list)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for other, profile in known:
        for op, op_s in zip(other.ops, profile.op_seconds, strict=True):
            work[op.target].append(_work(other, op))
            seconds[op.target].append(op_s)
    every_s = np.concatenate([*seconds.values()])
    issue_s = float(np.quantile(every_s, QUICKEST))
    costs = {kind: _fitted(work[kind], seconds[kind], issue_s) for kind in work if len(work[kind]) >= LEAST_OPS}
    nbytes = sum(own[0] for of_kind in work.values() for own in of_kind)
    others = np.array([np.maximum(every_s - issue_s, 0.0).sum() / nbytes, 0.0])
    profiles = [profile for _, profile in known]
    return Profile(
        graph.fingerprint,
        f"{profiles[0].device}, predicted from {len(known)} profiles",
        tuple(issue_s + float(costs.get(op.target, others) @ _work(graph, op)) for op in graph.ops),
        _middle(profile.swap_in for profile in profiles),
        _middle(profile.swap_out for profile in profiles),
        statistics.median(profile.compute_slowdown for profile in profiles),
        statistics.median(profile.swap_slowdown for profile in profiles),
    )


def _work(graph: Graph, op: Op) -> list[float]:
    """An op's bytes, and its multiplications."""
    sizes = sorted((graph.tensors[t].nbytes for t in (*op.reads, *op.writes)), reverse=True)
    return [float(sum(sizes)), math.sqrt(math.prod(n / _ELEMENT_BYTES for n in sizes[:3]))]


def _fitted(work: Sequence[Sequence[float]], seconds: Sequence[float], issue_s: float) -> Floats:
    """Seconds per byte and per multiplication, none less than nothing. Long ops count more, short ones still count.

    Multiplications cost nothing unless they explain most of what bytes do not: elementwise ops have none.
    """
    above_s = np.maximum(np.subtract(seconds, issue_s), 0.0)
    scale = 1 / np.sqrt(above_s + max(issue_s, _LEAST_S))
    rows, wanted = np.array(work) * scale[:, None], above_s * scale
    units = np.maximum(rows.max(axis=0), 1e-300)  # the solver wants columns of like size
    both, left = nnls(rows / units, wanted)
    by_bytes, left_by_bytes = nnls(rows[:, :1] / units[:1], wanted)
    costs: Floats = (both if left < EXPLAINED * left_by_bytes else np.append(by_bytes, 0.0)) / units
    return costs


def _middle(links: Iterable[Link]) -> Link:
    """A link of the median latency and the median bandwidth."""
    latencies, bandwidths = zip(*((link.latency_s, link.bandwidth_bytes_per_s) for link in links), strict=True)
    return Link(statistics.median(latencies), statistics.median(bandwidths))

"""Predicts a graph's op times on a device from profiles of other graphs on it (TENSILE, section IV-A).

The paper uses a network of four layers per operator, on the dimensions of its inputs and parameters. Here a regression
per kind of op gives seconds per byte that it reads or writes, and per multiplication, in addition to the time of the
quickest ops, which do no work. Graphs have sizes but no shapes, so the number of multiplications is the square root of
the product of the sizes, in elements, of the three largest tensors: exact for a product of matrices, and too low by
the width of the kernel for a convolution.
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
"""Minimum number of known ops of a kind; rarer kinds take as long per byte as ops of all kinds together."""
QUICKEST: Final = 0.05
"""Fraction of ops that take no longer than issuing one."""
EXPLAINED: Final = 0.5
"""Multiplications count if they reduce the error of bytes alone to less than this fraction."""
_ELEMENT_BYTES: Final = 4
_LEAST_S: Final = 1e-6
"""Differences between shorter times come from the clock."""


def predicted(graph: Graph, known: Sequence[tuple[Graph, Profile]]) -> Profile:
    """Predict a graph's profile on the device of the known profiles (at least one)."""
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
    """Return an op's bytes and multiplications."""
    sizes = sorted((graph.tensors[t].nbytes for t in (*op.reads, *op.writes)), reverse=True)
    return [float(sum(sizes)), math.sqrt(math.prod(n / _ELEMENT_BYTES for n in sizes[:3]))]


def _fitted(work: Sequence[Sequence[float]], seconds: Sequence[float], issue_s: float) -> Floats:
    """Return nonnegative seconds per byte and per multiplication. Long ops weigh more, but short ones still count.

    Multiplications cost nothing unless they explain most of the error that bytes leave: elementwise ops have none.
    """
    above_s = np.maximum(np.subtract(seconds, issue_s), 0.0)
    scale = 1 / np.sqrt(above_s + max(issue_s, _LEAST_S))
    rows, wanted = np.array(work) * scale[:, None], above_s * scale
    units = np.maximum(rows.max(axis=0), 1e-300)  # the solver needs columns of similar size
    both, left = nnls(rows / units, wanted)
    by_bytes, left_by_bytes = nnls(rows[:, :1] / units[:1], wanted)
    costs: Floats = (both if left < EXPLAINED * left_by_bytes else np.append(by_bytes, 0.0)) / units
    return costs


def _middle(links: Iterable[Link]) -> Link:
    """Return a link with the median latency and the median bandwidth."""
    latencies, bandwidths = zip(*((link.latency_s, link.bandwidth_bytes_per_s) for link in links), strict=True)
    return Link(statistics.median(latencies), statistics.median(bandwidths))

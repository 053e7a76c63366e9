"""How memory is shared out among models, against the optimum: a multiple-choice knapsack, solved by HiGHS.

Each model has a curve of predicted latency over the partition's size. Shares that are equal, in proportion to rates,
and in proportion to weights are compared on the same curves. Models and caches are those of `make demo`, in `.demo`.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.record import markdown_table, parser_of, record
from cohabit.loadgen.arrivals import zipf_weights
from cohabit.planner.profile import Link
from cohabit.planner.sizing.demand import MemoryDemand
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import latency_curve
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.planner.sizing.shares import Curve, Point, latency_weights, share_out, weighted_latency_s
from cohabit.server.commands.fit import candidates
from cohabit.server.config.sources import config_of

SHARE = 0.25
"""Of all weights."""
EXPONENTS = (0.0, 0.9, 1.2)
LINKS = {"as measured": None, "2 GB/s": 2e9, "1 GB/s": 1e9}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser_of("benchmarks.planner.shares", __doc__).parse_args(argv)
    folders = {"repository": str(options.folder / "repository"), "cache": str(options.folder / "cache")}
    found, _ = candidates(config_of({**folders, "memory": "1B"}), lambda text: None)
    memory_bytes = int(sum(candidate.weight_bytes for candidate in found) * SHARE)
    rows = []
    for link, bandwidth in LINKS.items():
        models = [with_link(candidate.demand, bandwidth) for candidate in found]
        workspace_bytes = divide(models, memory_bytes).workspace_bytes
        curves = _curves(models, workspace_bytes)
        for exponent in EXPONENTS:
            for popular in ("first", "last"):
                names = [model.name for model in models]
                by_name = zipf_weights(names if popular == "first" else names[::-1], exponent)
                rates = np.array([by_name[name] for name in names])
                over = _over_optimum(models, curves, rates, memory_bytes - workspace_bytes)
                rows.append(
                    [f"{link}, Zipf {exponent:g}, {popular} popular", *(f"{ratio - 1:.2%}" for ratio in over)]
                )
    header = ["link, rates", "share_out", "equal shares", "in proportion to rates", "to weights"]
    about = f"{len(found)} models in {SHARE:.0%} of their weights: predicted, weighted latency over the least.\n"
    table = markdown_table(header, rows)
    print(about, table, sep="\n")
    if options.record:
        record(
            "planner-shares",
            "Memory among models, against the optimum",
            "benchmarks.planner.shares",
            [about, table],
        )
    return 0


def with_link(model: ModelDemand, bandwidth: float | None) -> ModelDemand:
    if bandwidth is None:
        return model
    slower = {
        bucket: structs.replace(profile, swap_in=Link(profile.swap_in.latency_s, bandwidth))
        for bucket, profile in model.profiles.items()
    }
    return replace(model, profiles=slower)


def _curves(models: Sequence[ModelDemand], workspace_bytes: int) -> list[Curve]:
    curves, known = [], dict[tuple[str, bool, str, int, int], float]()
    for demand in map(MemoryDemand.of, models):
        least = demand.least_partition_bytes(workspace_bytes)
        assert least is not None
        footprint, profile = demand.footprints[demand.smallest], demand.model.profiles[demand.smallest]
        curves.append(latency_curve(footprint, profile, least, demand.parameter_bytes, workspace_bytes, known))
    return curves


def _over_optimum(
    models: Sequence[ModelDemand], curves: Sequence[Curve], rates: np.ndarray, memory_bytes: int
) -> list[float]:
    """Return the weighted latency of `share_out`, and of three kinds of fixed shares, over the optimum's."""
    weights = latency_weights(rates.tolist(), [model.profiles[min(model.profiles)].compute_s for model in models])
    sizes = np.array([curve[-1].partition_bytes for curve in curves])
    shares = [memory_bytes * part / part.sum() for part in (np.ones(len(models)), rates, sizes)]
    chosen = [share_out(curves, weights, memory_bytes)]
    chosen += [[_largest_in(c, nbytes) for c, nbytes in zip(curves, share, strict=True)] for share in shares]
    optimum_s = _optimum_s(curves, weights, memory_bytes)
    return [weighted_latency_s(points, weights) / optimum_s for points in chosen]


def _largest_in(curve: Curve, nbytes: float) -> Point:
    """Return the largest point that a share has room for; every model has its least."""
    return max(
        (p for p in curve[1:] if p.partition_bytes <= nbytes), key=lambda p: p.partition_bytes, default=curve[0]
    )


def _optimum_s(curves: Sequence[Curve], weights: Sequence[float], memory_bytes: int) -> float:
    """Choose one point of each curve, so that the weighted latency is least and they fit together."""
    cost = np.array([weight * p.latency_s for curve, weight in zip(curves, weights, strict=True) for p in curve])
    mebibytes = np.array([p.partition_bytes / 2**20 for curve in curves for p in curve])
    owners = np.repeat(np.arange(len(curves)), [len(curve) for curve in curves])
    one_each = (owners == np.arange(len(curves))[:, None]).astype(float)
    found = milp(
        cost / cost.max(),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(mebibytes, -np.inf, memory_bytes / 2**20)],
        options={"mip_rel_gap": 1e-6},
    )
    assert found.success
    return float(found.fun * cost.max())


if __name__ == "__main__":
    sys.exit(main())

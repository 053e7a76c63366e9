"""How fast the planner is, and how good: ResNet-152 at batch 1 with costs like a V100's.

    python benchmarks/planner_simulate.py

155 convolutions with ResNet-152's weight sizes, 17 ms in proportion to their flops; 12 GB/s and 10 us per transfer.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

from planner.errors import format_bytes
from planner.feasible import page_aligned
from planner.graph import Graph, Op, Tensor
from planner.profile import Link, Profile
from planner.search import Problem, search
from planner.simulate import prepare, run_once, simulate
from planner.sizing import split_budget

STAGES = ((64, 3, 56), (128, 8, 28), (256, 36, 14), (512, 3, 7))  # width, blocks, side of the output


def convolutions() -> list[tuple[int, int, int, int]]:
    """Input channels, output channels, kernel and output side of each, in order; the classifier comes last."""
    layers = [(3, 64, 7, 112)]
    channels = 64
    for width, blocks, side in STAGES:
        for block in range(blocks):
            layers += [(channels, width, 1, side), (width, width, 3, side), (width, 4 * width, 1, side)]
            if block == 0:
                layers.append((channels, 4 * width, 1, side))
            channels = 4 * width
    return [*layers, (2048, 1000, 1, 1)]


def resnet152() -> Graph:
    layers = convolutions()
    tensors = [
        Tensor(f"conv{i}.weight", page_aligned(4 * (c_in * c_out * kernel**2 + c_out)), "parameter", 4096)
        for i, (c_in, c_out, kernel, _) in enumerate(layers)
    ]
    tensors.append(Tensor("image", 4 * 3 * 224**2, "input"))
    ops = []
    for i, (_, c_out, _, side) in enumerate(layers):
        tensors.append(Tensor(f"conv{i}.out", 4 * c_out * side**2, "activation"))
        ops.append(Op(f"conv{i}", "conv", (i, len(tensors) - 2), (len(tensors) - 1,)))
    return Graph("resnet152", 1, "synthetic", tuple(tensors), tuple(ops), (len(tensors) - 1,))


def v100(graph: Graph, total_s: float = 17e-3) -> Profile:
    flops = [c_in * c_out * kernel**2 * side**2 for c_in, c_out, kernel, side in convolutions()]
    op_s = tuple(0.5 * total_s * (n / sum(flops) + 1 / len(flops)) for n in flops)
    link = Link(10e-6, 12e9)
    return Profile(graph.fingerprint, "V100-like", op_s, link, link)


def seconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and worst time of a call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    graph = resnet152()
    profile = v100(graph)
    start = time.perf_counter()
    search(Problem(graph, profile, 0, 2**28), rounds=0)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"compiling or loading the inner loops took {time.perf_counter() - start:.1f} s")
    print(f"{len(graph.ops)} ops, {format_bytes(graph.parameter_bytes)} of parameters")
    print(
        f"{'memory':>8} {'split (MiB)':>15} {'latency':>9} {'bound':>9} {'gap':>6} {'period':>9} {'plan':>7} simulate"
    )
    for share in (0.125, 0.25, 0.5, 0.75):
        budget = page_aligned(int(share * graph.parameter_bytes))
        partition, workspace = split_budget({1: graph}, {1: profile}, budget)
        start = time.perf_counter()
        plan = search(Problem(graph, profile, partition, workspace))
        plan_s = time.perf_counter() - start
        lanes = prepare(graph, plan, profile)
        prepared, _ = seconds(lambda lanes=lanes: run_once(lanes, profile), repeats)  # type: ignore[misc]
        whole, _ = seconds(lambda plan=plan: simulate(graph, plan, profile), repeats)  # type: ignore[misc]
        quality = plan.provenance
        assert quality is not None
        print(
            f"{share:8.1%} {partition / 2**20:7.1f}+{workspace / 2**20:<7.1f} {quality.latency_s * 1e3:6.2f} ms"
            f" {quality.bound_s * 1e3:6.2f} ms {quality.gap:6.2%} {quality.period_s * 1e3:6.2f} ms {plan_s:5.2f} s"
            f" {prepared * 1e6:.0f} us prepared, {whole * 1e6:.0f} us from the plan"
        )


if __name__ == "__main__":
    main()

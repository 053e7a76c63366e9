"""Load tests as pictures: latency over throughput, CDF, timeline."""

from pathlib import Path

from cohabit.loadgen.drawing.latencies import Series, latency_curves
from cohabit.loadgen.errors import UnavailableModel


def write_pictures(folder: Path, series: Series) -> None:
    """Write throughput.png (for several rates), cdf.png and timeline.png, the last two of the highest common rate."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UnavailableModel("--png needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    runs = {
        name: sorted(map(latency_curves, reports), key=lambda one: one.run.rate_per_s)
        for name, reports in series.items()
    }
    if max(map(len, runs.values())) > 1:  # a curve needs several rates
        figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for name, own in runs.items():
            answered = [(one.run.achieved_per_s, one.run.latency.p99_s * 1e3) for one in own if one.run.latency]
            panel.plot([x for x, _ in answered], [y for _, y in answered], "o-", label=name)
        panel.set(xlabel="answered requests per second", ylabel="p99 latency, ms", yscale="log")
        panel.legend()
        figure.savefig(folder / "throughput.png", dpi=130)
        plt.close(figure)
    # The other pictures have one run per series, at the same rate if there is one.
    common = set.intersection(*({one.run.rate_per_s for one in own} for own in runs.values()))
    chosen = {
        name: next((one for one in own if one.run.rate_per_s == max(common, default=None)), own[-1])
        for name, own in runs.items()
    }
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, one in chosen.items():
        panel.step(
            [x for x, _ in one.cdf],
            [1 - y for _, y in one.cdf],
            where="post",
            label=f"{name}, {one.run.rate_per_s:g}/s",
        )
    panel.set(xlabel="latency, ms", ylabel="share of requests not answered by then", xscale="log", yscale="log")
    panel.legend()
    figure.savefig(folder / "cdf.png", dpi=130)
    plt.close(figure)
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, one in chosen.items():
        points = [(start_s, p99) for start_s, _, p99 in one.timeline if p99 is not None]
        panel.plot([x for x, _ in points], [y for _, y in points], label=f"{name}, {one.run.rate_per_s:g}/s")
    panel.set(xlabel="seconds of the run", ylabel="p99 latency, ms", yscale="log")
    panel.legend()
    figure.savefig(folder / "timeline.png", dpi=130)
    plt.close(figure)

"""Ensembles against the calls that they replace: an ensemble of one against its model, three steps against three calls.

Open loop over HTTP with `tritonclient`, Poisson arrivals. Each request goes one of the two ways, at random, so that
both meet the same queues and the same noise. Latencies count from the arrival.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.http.aio import InferenceServerClient as HttpClient

from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import serve_command
from benchmarks.turns import Quartiles, turns
from cohabit.loadgen.client import address_of
from cohabit.loadgen.server_process import running_server
from cohabit.loadgen.zoo.exporting import save_model
from cohabit.loadgen.zoo.seeded import seeded

WIDTH, LAYERS, STEPS = 512, 4, 3
RATES, CHAIN_RATE = (100.0, 300.0), 50.0
PATIENCE_S = 300.0
MOST_OVER_MODEL, MOST_OVER_CALLS = 1.05, 0.9
"""What an ensemble may take: of its only model's latency, and of the p99 of a client's calls of its three models."""

Latencies = NDArray[np.float64]
OF_ONE, OF_THREE = "an ensemble of one over its model", "an ensemble of three over three calls"
Pair = tuple[str, float]
"""What is compared, and the requests per second of both together."""


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return {"y": x}


def prepare(repository: Path) -> None:
    """Write three models, and ensembles of the first one and of all of them."""
    for number in range(STEPS):
        path = repository / f"model_{number}" / "1" / "model.pt2"
        if not path.exists():
            with seeded(number):
                batch = {"x": {0: torch.export.Dim("batch", max=8)}}
                program = torch.export.export(
                    Layers().eval(), (), {"x": torch.zeros(2, WIDTH)}, dynamic_shapes=batch
                )
            save_model(program, path, {})
    ends = f"data_type: TYPE_FP32 dims: {WIDTH}"
    head = f"platform: 'ensemble' max_batch_size: 8 input {{ name: 'x' {ends} }} output {{ name: 'y' {ends} }}\n"
    for name, count in (("ensemble_of_1", 1), ("ensemble_of_3", STEPS)):
        names = ["x", *(f"between_{number}" for number in range(1, count)), "y"]
        steps = "".join(
            f"step {{ model_name: 'model_{number}' input_map {{ key: 'x' value: '{names[number]}' }}"
            f" output_map {{ key: 'y' value: '{names[number + 1]}' }} }}\n"
            for number in range(count)
        )
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        (repository / name / "config.pbtxt").write_text(f"{head}ensemble_scheduling {{ {steps} }}\n")


async def call(client: HttpClient, *models: str) -> NDArray[np.float32]:
    """Send one request to each model in turn: the output of one is the input of the next."""
    y = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]
    for model in models:
        sent = triton.InferInput("x", list(y.shape), "FP32")
        y = (await client.infer(model, [sent.set_data_from_numpy(y)])).as_numpy("y")
    return y


async def open_loop(
    client: HttpClient, ways: Sequence[Sequence[str]], rate_per_s: float, seconds: float, seed: int
) -> list[Latencies]:
    """Return, for each way, seconds from each arrival to its answer. Each arrival goes one of the ways, at random."""
    loop = asyncio.get_running_loop()
    draws = np.random.default_rng(seed)
    count = round(rate_per_s * seconds)
    arrivals, chosen = np.cumsum(draws.exponential(1 / rate_per_s, count)), draws.integers(len(ways), size=count)
    start_s = loop.time() + 0.1

    async def one(arrival_s: float, way: int) -> float:
        await asyncio.sleep(start_s + arrival_s - loop.time())
        await call(client, *ways[way])
        return loop.time() - start_s - arrival_s

    taken = np.array(await asyncio.gather(*map(one, arrivals.tolist(), chosen.tolist())))
    return [taken[chosen == way] for way in range(len(ways))]


async def measure(url: str, options: argparse.Namespace) -> dict[Pair, list[list[Latencies]]]:
    async with HttpClient(address_of(url), conn_limit=512) as client:
        calls = [f"model_{number}" for number in range(STEPS)]
        if not np.array_equal(await call(client, *calls), await call(client, "ensemble_of_3")):
            raise ValueError("the ensemble's answer differs from its steps'")
        ways = {OF_ONE: [calls[:1], ["ensemble_of_1"]], OF_THREE: [calls, ["ensemble_of_3"]]}
        pairs = [*((OF_ONE, rate) for rate in RATES), (OF_THREE, CHAIN_RATE)]
        for what, _ in pairs:
            await open_loop(client, ways[what], CHAIN_RATE, 2.0, seed=0)  # warm up
        found: dict[Pair, list[list[Latencies]]] = {pair: [] for pair in pairs}
        for number, (what, rate) in turns(pairs, options.rounds):
            found[what, rate].append(await open_loop(client, ways[what], rate, options.seconds, seed=number))
        return found


def table(found: Mapping[Pair, Sequence[Sequence[Latencies]]]) -> tuple[str, bool]:
    rows, holds = [], True
    for (what, rate), rounds in found.items():
        row = [what, f"{rate:g}"]
        for percentile in (50, 99):
            theirs, ours = ([float(np.percentile(one[way], percentile)) for one in rounds] for way in (0, 1))
            ratio = Quartiles.of_ratios(ours, theirs)
            row += [*(f"{np.median(seconds) * 1e3:.2f}" for seconds in (theirs, ours)), str(ratio)]
            most = MOST_OVER_MODEL if what == OF_ONE or percentile == 50 else MOST_OVER_CALLS
            holds &= ratio.middle <= most
        rows.append(row)
    header = ["", "per second", *(f"{p} {what}" for p in ("p50", "p99") for what in ("calls", "ensemble", "ratio"))]
    return markdown_table(header, rows), holds


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.ensembles", __doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of all pairs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of each (default: %(default)s)")
    options = parser.parse_args(argv)
    repository = options.folder / "ensembles"
    prepare(repository)

    async def run() -> dict[Pair, list[list[Latencies]]]:
        command = serve_command(repository, "120%", None, options.folder / "ensembles-cache")
        async with running_server(command, PATIENCE_S) as url:
            return await measure(url, options)

    shown, holds = table(asyncio.run(run()))
    publish(options, "Ensembles and the calls that they replace", [ABOUT, shown])
    return 0 if holds else 1


ABOUT = f"""Milliseconds over HTTP, batch 1, everything resident. Each model has {LAYERS} layers of {WIDTH} by {WIDTH}.
Medians of the rounds, and the quartiles of the rounds' ratios. To hold: at most {MOST_OVER_MODEL} for an
ensemble of one, and at most {MOST_OVER_CALLS} for the p99 of three steps.
"""

if __name__ == "__main__":
    sys.exit(main())

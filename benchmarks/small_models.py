"""Models of less than 10 ms, served and in eager PyTorch: what a server adds where computing takes little.

One client asks one model at a time over HTTP, in turns with eager PyTorch in the client's process on one thread.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import tritonclient.http
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import serve_command
from benchmarks.turns import seconds_of
from cohabit.loadgen.client import address_of
from cohabit.loadgen.server_process import running_server
from cohabit.loadgen.zoo import ZOO
from cohabit.loadgen.zoo.exporting import export_model, save_model
from cohabit.loadgen.zoo.seeded import seeded

LIMIT_S = 3e-4
"""What the server may take longer than eager PyTorch."""
FROM_ZOO = ("bert_small", "mobilenet_v2")
PATIENCE_S = 300.0
WARM_UP = 20
"""Rounds that do not count."""
WAYS = ("eager", "server", "client")

Inputs = Mapping[str, Tensor]


class Ranker(nn.Module):
    """A deep-learning recommendation model: two towers, eight embedding bags, and their dot products (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 32, mode="sum") for _ in range(8))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 36, 256), nn.ReLU(), nn.Linear(256, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(ids[:, n]) for n, bag in enumerate(self.bags))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(9, 9, offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], dim=1))


class Integers(nn.Module):
    """Layers whose weights are 8-bit integers with a scale per row."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(4):
            self.register_buffer(f"weight{n}", torch.randint(-127, 128, (512, 512), dtype=torch.int8))
            self.register_buffer(f"scale{n}", torch.rand(512, 1) / 2000)

    def forward(self, x: Tensor) -> Tensor:
        for n in range(4):
            weight = self.get_buffer(f"weight{n}").float() * self.get_buffer(f"scale{n}")
            x = torch.relu(nn.functional.linear(x, weight))
        return x


class Unrolled(nn.Module):
    """Two layers of LSTM cells over 32 steps, one call after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(64, 128), nn.LSTMCell(128, 128)])

    def forward(self, x: Tensor) -> Tensor:
        states = [(x.new_zeros(x.shape[0], 128), x.new_zeros(x.shape[0], 128)) for _ in self.cells]
        y = x[:, 0]
        for step in range(x.shape[1]):
            y = x[:, step]
            for n, cell in enumerate(self.cells):
                states[n] = cell(y, states[n])
                y = states[n][0]
        return y


class Recurrence(nn.Module):
    """A loop of 1,500 elementwise ops, as in recurrences that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(64) / 10) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(state * self.weight + x[:, step]) * torch.sigmoid(state + self.bias)
        return state


def small_models() -> dict[str, tuple[nn.Module, Inputs]]:
    """Return modules in eval mode with example inputs, batch 2 for export."""
    with seeded(0):
        ids = torch.randint(0, 20_000, (2, 8, 4))
        models: dict[str, tuple[nn.Module, Inputs]] = {
            "dlrm": (Ranker().eval(), {"dense": torch.randn(2, 13), "ids": ids}),
            "int8_layers": (Integers().eval(), {"x": torch.randn(2, 512)}),
            "unrolled_lstm": (Unrolled().eval(), {"x": torch.randn(2, 32, 64)}),
            "recurrence": (Recurrence().eval(), {"x": torch.randn(2, 250, 64)}),
        }
    return models | {name: ZOO[name].build(0) for name in FROM_ZOO}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    torch.set_num_threads(1)
    models = small_models()
    repository = options.folder / "small-models"
    for name, (module, inputs) in models.items():
        path = repository / name / "1" / "model.pt2"
        if not path.exists():
            console.print(f"exporting {name}")
            save_model(export_model(module, inputs), path, {})
    measured = asyncio.run(_served(repository, models, options, console))
    table, holds = _table(measured)
    publish(options, "Small models, served and eager", [_ABOUT, table])
    return 0 if holds else 1


_ABOUT = f"""Milliseconds, batch 1, one client, everything resident, one compute thread. *Server* is the duration of
the request in the server's statistics, waiting included; *client* is by the client's clock, over HTTP with
`tritonclient`. *Over eager* is the server's median and 90th percentile less those of eager PyTorch, at most
{LIMIT_S * 1e3:g} ms to hold.
"""


async def _served(
    repository: Path, models: Mapping[str, tuple[nn.Module, Inputs]], options: argparse.Namespace, console: Console
) -> dict[str, dict[str, tuple[float, ...]]]:
    command = serve_command(repository, "120%", None, options.folder / "small-models-cache")
    async with running_server(command, PATIENCE_S, console.print) as url:
        measured = {}
        with tritonclient.http.InferenceServerClient(address_of(url)) as client:
            for name, (module, inputs) in models.items():
                one = {key: value[:1].contiguous() for key, value in inputs.items()}
                once = _round(client, name, module, one)
                for _ in range(WARM_UP):
                    once()
                rounds = [once() for _ in track(range(options.rounds), name, console=console, transient=True)]
                measured[name] = dict(zip(WAYS, zip(*rounds, strict=True), strict=True))
    return measured


def _round(
    client: tritonclient.http.InferenceServerClient, name: str, module: nn.Module, inputs: Inputs
) -> Callable[[], tuple[float, float, float]]:
    """Return a call that runs a model eagerly, then served. It returns the seconds in the order of `WAYS`."""
    tensors = []
    for key, value in inputs.items():
        datatype = tritonclient.utils.np_to_triton_dtype(value.numpy().dtype)
        tensors.append(tritonclient.http.InferInput(key, list(value.shape), datatype))
        tensors[-1].set_data_from_numpy(value.numpy())

    def once() -> tuple[float, float, float]:
        with torch.inference_mode():
            eager_s = seconds_of(lambda: module(**inputs))
        before_ns = _served_ns(client, name)
        client_s = seconds_of(lambda: client.infer(name, tensors))
        return eager_s, (_served_ns(client, name) - before_ns) / 1e9, client_s

    return once


def _served_ns(client: tritonclient.http.InferenceServerClient, name: str) -> int:
    (statistics,) = client.get_inference_statistics(name)["model_stats"]
    return int(statistics["inference_stats"]["success"]["ns"])


def _table(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[str, bool]:
    rows, holds = [], True
    for name, times in measured.items():
        found = {way: np.percentile(taken, [50, 90]) for way, taken in times.items()}
        over = found["server"] - found["eager"]
        holds &= bool((over <= LIMIT_S).all())
        shown = (found["eager"], found["server"], over, found["client"])
        rows.append([name, *(f"{second * 1e3:.2f}" for pair in zip(*shown, strict=True) for second in pair)])
    header = [f"{way} {which}" for which in ("p50", "p90") for way in ("eager", "server", "over eager", "client")]
    return markdown_table(["model", *header], rows), holds


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.small_models", __doc__)
    parser.add_argument("--rounds", type=int, default=500, help="requests of each model (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Moves and restarts on this GPU: six models serve a load, a seventh is loaded, and the engine is killed.

Every answer must have the bits of the first one to its request, and these must be near eager PyTorch's.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import torch
import tritonclient.http
from rich.console import Console
from torch.utils._pytree import tree_leaves
from tritonclient.http import InferInput

from benchmarks.faults import ANSWERED, DIFFERENT, Outcome, inject, load, questions, until_ok
from benchmarks.gpu import steps
from benchmarks.record import markdown_table
from benchmarks.scrape import serve_command, serving
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_tensors
from cohabit.loadgen.zoo.repository import PreparedModel, prepare_visibly, recipes

FOLDER = Path(".gpu")
DEVICE = "cuda:0"
MODELS, RATE, SECONDS = 7, 100.0, 5.0
SHARES = {"50 %": 0.5, "25 %": 0.25}
"""Of all weights, by the cell's name."""


@dataclass(frozen=True, slots=True)
class Row:
    """Requests of one phase."""

    phase: str
    answered: int
    different: int
    """With other bits than the first answer to the same request."""
    refused: int
    device_mib: float | None
    """Used on the device, by all processes, at the end of the phase."""


def cells() -> list[str]:
    return list(SHARES)


def measure(cell: str) -> Iterator[Row | str]:
    prepared = prepare_visibly(FOLDER / "loads", recipes(MODELS), force=False, console=Console())
    yield Row("before the start", 0, 0, 0, _used_mib())
    memory = int(SHARES[cell] * sum(model.weight_bytes for model in prepared))
    rows, worst = asyncio.run(_served(prepared, str(memory)))
    yield from rows
    yield Row("after the end", 0, 0, 0, _used_mib())
    yield f"{cell} of the weights: answers differ from eager PyTorch's by {worst:.1e} of an output's largest value."


async def _served(prepared: Sequence[PreparedModel], memory: str) -> tuple[list[Row], float]:
    names = [model.recipe.name for model in prepared]
    chosen = [flag for name in names[:-1] for flag in ("--load-model", name)]
    command = serve_command(FOLDER / "loads", memory, None, FOLDER / "cache", "--device", DEVICE)
    command += ["--model-control-mode", "explicit", *chosen]
    command += ["--batch-sizes", "1"]  # the bits of a row may depend on its batch
    rows = []
    async with serving(command, show_log=True) as server, aiohttp.ClientSession() as session:
        asked = await asyncio.to_thread(questions, server.url, names[:-1])

        async def phase(name: str, event: asyncio.Task[None] | None = None) -> None:
            stop, found = asyncio.Event(), Outcome()
            requests = asyncio.create_task(load(session, asked, RATE, found, stop))
            await asyncio.sleep(SECONDS)
            if event is not None:
                await event
            stop.set()
            await requests
            answered, different = found.outcomes[ANSWERED], found.outcomes[DIFFERENT]
            rows.append(Row(name, answered, different, found.outcomes.total() - answered - different, _used_mib()))

        await phase("six models")
        loading = until_ok(session, "POST", f"{server.url}/v2/repository/models/{names[-1]}/load")
        await phase("a seventh is loaded", asyncio.create_task(loading))
        asked += await asyncio.to_thread(questions, server.url, names[-1:])
        await phase("seven models")
        await phase("the engine is killed", asyncio.create_task(inject(session, server, "SIGKILL", Outcome())))
        await phase("after the restart")
        worst = await asyncio.to_thread(_difference_from_eager, server.url, prepared)
    return rows, worst


def _difference_from_eager(url: str, prepared: Sequence[PreparedModel]) -> float:
    """Return the largest difference of one answer of each model from its archive's program on the same device."""
    worst, rng = 0.0, np.random.default_rng(1)
    with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=600.0) as client:
        for model in prepared:
            metadata = client.get_model_metadata(model.recipe.name)
            drawn = random_tensors(metadata, 1, rng)
            inputs = [InferInput(each.name, list(each.values.shape), each.datatype) for each in drawn]
            for tensor, each in zip(inputs, drawn, strict=True):
                tensor.set_data_from_numpy(each.values)
            answer = client.infer(model.recipe.name, inputs)
            module = torch.export.load(model.path).module().to(DEVICE)
            with torch.inference_mode():
                results = module(**{each.name: torch.from_numpy(each.values).to(DEVICE) for each in drawn})
            for spec, result in zip(metadata["outputs"], tree_leaves(results), strict=True):
                expected = result.float().cpu().numpy()
                difference = np.abs(answer.as_numpy(spec["name"]) - expected).max()
                worst = max(worst, float(difference / (np.abs(expected).max() or 1.0)))
    return worst


def _used_mib() -> float | None:
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (total_bytes - free_bytes) / 2**20


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    table = [
        [
            row.phase,
            str(row.answered),
            str(row.different),
            str(row.refused),
            "" if row.device_mib is None else f"{row.device_mib:.0f}",
        ]
        for row in rows
    ]
    header = ("phase", "answered", "with other bits", "refused", "used on the device, MiB")
    return [markdown_table(header, table), *(f"{note}\n" for note in notes)]


STEP = steps.Step(
    "benchmarks.gpu.loads", "Loads and restarts under load on a GPU", Row, cells, measure, _sections, cell_s=120.0
)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))

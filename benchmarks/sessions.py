"""A chat beside three other models, in half of their weights and a little more: what texts and embeddings wait for.

Texts of a small language model and requests to a sentence encoder alternate, with a ranker and a reranker between. With
partitions nothing is loaded again: weights stream, and what a text has so far stays. `lru` keeps whole models, the most
recently used, and loads one again that it has displaced.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console

from benchmarks.language_model import ABOUT, PROMPT, imported, stream_text
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import Running, by_model, serve_command, serving
from cohabit.loadgen.zoo.repository import Recipe, prepare_visibly

OTHERS = (
    Recipe("embedder", "minilm_short", 0),
    Recipe("reranker", "bert_small", 0),
    Recipe("ranker", "ranker", 0),
)
MOST_TOKENS, MAX_BATCH, TOKENS = 256, 2, 24
LAYOUTS = {
    "resident": ("resident", None),
    "partitioned, 50%": ("partitioned", "50%"),
    "partitioned, 60%": ("partitioned", "60%"),
    "lru, 60%": ("lru", "60%"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.sessions", __doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each layout (default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="(default: all)")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    repository = options.folder / "sessions"
    prepare_visibly(repository, OTHERS, force=False, console=console)
    imported(options.folder, repository, MAX_BATCH, MOST_TOKENS)
    rows = []
    for name in options.layouts:
        console.print(name)
        layout, memory = LAYOUTS[name]
        rows.append([f"`{layout}`", memory or "all", *asyncio.run(_measured(options, layout, memory))])
    header = ["layout", "memory", "texts", "first token p50 ms", "p99 ms", "between tokens p50 ms", "p99 ms"]
    header += ["embedding p50 ms", "p99 ms", "copied MiB per text", "steps per text"]
    about = (
        f"{ABOUT}; MiniLM, a BERT of 4 layers and a ranker beside it. A text is a prompt of {PROMPT} tokens and"
        f" {TOKENS} more; while it is generated, and after it, the other models are asked in turn, one request at a"
        f" time. A text that is computed once takes {TOKENS} steps. In 50 % `lru` cannot hold the language model, which"
        " it needs whole."
        f" Client, front end and engine share the CPUs; {options.seconds:g} s of each layout.\n"
    )
    publish(options, "A chat beside other models", [about, markdown_table(header, rows)])
    return 0


async def _measured(options: argparse.Namespace, layout: str, memory: str | None) -> list[str]:
    repository, flags = options.folder / "sessions", ("--threads", "1", "--batch-sizes", "1,2")
    command = serve_command(repository, memory or "2GiB", layout, options.folder / "cache", *flags)
    async with serving(command) as server, aiohttp.ClientSession() as session:
        requests = {recipe.name: await _request(session, server.url, recipe.name) for recipe in OTHERS}
        await stream_text(session, server.url, 0, TOKENS)
        ended, waits = asyncio.Event(), list[float]()
        others = asyncio.create_task(_ask(session, server.url, requests, ended, waits))
        before = [server.total("cohabit_swapped_bytes_total"), _steps(server)]
        texts = list[tuple[float, list[float]]]()
        end_s = time.perf_counter() + options.seconds
        while time.perf_counter() < end_s:
            asked_s = time.perf_counter()
            texts.append((asked_s, await stream_text(session, server.url, len(texts) + 1, TOKENS)))
            await asyncio.sleep(0.2)
        ended.set()
        await others
        after = [server.total("cohabit_swapped_bytes_total"), _steps(server)]
        copied, steps = ((now - then) / len(texts) for now, then in zip(after, before, strict=True))
    first = np.array([times[0] - start_s for start_s, times in texts]) * 1e3
    gaps = np.concatenate([np.diff(times) for _, times in texts]) * 1e3
    cells = [*np.percentile(first, [50, 99]), *np.percentile(gaps, [50, 99]), *np.percentile(waits, [50, 99])]
    return [str(len(texts)), *(f"{cell:.1f}" for cell in cells), f"{copied / (1 << 20):.0f}", f"{steps:.2f}"]


def _steps(server: Running) -> float:
    """How many requests the language model has answered."""
    return by_model(server.metrics_url, "nv_inference_request_success")["chat"]


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    requests: Mapping[str, Mapping[str, Any]],
    ended: asyncio.Event,
    waits: list[float],
) -> None:
    """Ask the other models in turn, and note what the embedder's requests took, in milliseconds."""
    while not ended.is_set():
        for name, body in requests.items():
            start_s = time.perf_counter()
            async with session.post(f"{url}/v2/models/{name}/infer", json=body) as response:
                response.raise_for_status()
                await response.read()
            if name == "embedder":
                waits.append((time.perf_counter() - start_s) * 1e3)
            await asyncio.sleep(0.1)


async def _request(session: aiohttp.ClientSession, url: str, name: str) -> dict[str, Any]:
    """Return a request of one row, of ones, for a model."""
    async with session.get(f"{url}/v2/models/{name}") as response:
        described = await response.json()
    inputs = []
    for tensor in described["inputs"]:
        shape = [1, *tensor["shape"][1:]]
        ones = np.ones(shape, int).tolist()
        inputs.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": ones})
    return {"inputs": inputs}


if __name__ == "__main__":
    sys.exit(main())

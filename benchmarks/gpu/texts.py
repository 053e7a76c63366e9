"""Texts generated on this GPU: by a server over HTTP, with a small language model resident and in less memory than its
weights, and by transformers' own loop on the same GPU, whose tokens the server's have to be.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import torch

from benchmarks.gpu import steps
from benchmarks.language_model import ABOUT, NO_END, PROMPT, folder_of_model, imported
from benchmarks.record import markdown_table
from benchmarks.scrape import serving

FOLDER = Path(".gpu")
MAX_BATCH, MOST_TOKENS, TOKENS = 8, 256, 128
TEXTS = (1, 8)
MEMORIES = ("150MiB", "2GiB")
PEER = "transformers `generate`"


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that were generated at once."""

    way: str
    count: int
    tokens_per_s: float
    first_s: float | None
    between_p50_s: float | None
    between_p99_s: float | None
    same: int | None
    """How many have the tokens of transformers' loop."""


def cells() -> list[str]:
    return list(MEMORIES)


def measure(cell: str) -> Iterator[Texts | str]:
    repository = FOLDER / "texts"
    start_s = time.perf_counter()
    imported(FOLDER, repository, MAX_BATCH, MOST_TOKENS)
    yield f"Imported in {time.perf_counter() - start_s:.0f} s."
    expected, rows = _generated()
    yield from rows
    start_s = time.perf_counter()
    yield from asyncio.run(_served(repository, cell, expected))
    yield f"`--memory {cell}`: all of it took {time.perf_counter() - start_s:.0f} s, the start included."


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(3, 8000, PROMPT).tolist() for n in range(count)]


def _generated() -> tuple[list[list[int]], list[Texts]]:
    """Return what transformers generates alone for each prompt, and how fast its loop is for one and for several."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of_model(FOLDER)).eval().to("cuda")
    rows, alone = [], list[list[int]]()

    def generate(given: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(given, device="cuda")
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=[2],
        )
        made: list[list[int]] = found[:, PROMPT:].tolist()
        return made

    with torch.inference_mode():
        generate(prompts(1), 4)
        for count in TEXTS:
            start_s = time.perf_counter()
            generate(prompts(count), TOKENS)
            rows.append(_row(PEER, count, count * TOKENS / (time.perf_counter() - start_s)))
        for prompt in prompts(max(TEXTS)):
            alone += generate([prompt], TOKENS)
    return alone, rows


def _row(way: str, count: int, tokens_per_s: float) -> Texts:
    return Texts(way, count, tokens_per_s, None, None, None, None)


async def _served(repository: Path, memory: str, expected: Sequence[list[int]]) -> list[Texts]:
    command = [sys.executable, "-m", "cohabit.server.cli", "serve", str(repository), "--device", "cuda:0"]
    command += ["--memory", memory, "--http-port", "0", "--grpc-port", "off", "--metrics-port", "0"]
    command += ["--no-quick-start", "--batch-sizes", "1,8", "--cache", str(FOLDER / "cache")]
    rows = []
    async with serving(command, show_log=True) as server, aiohttp.ClientSession() as session:
        for count in TEXTS:
            for _ in range(2):  # what is captured the second time that it comes
                await asyncio.gather(*(_text(session, server.url, p) for p in prompts(count)))
            start_s = time.perf_counter()
            found = await asyncio.gather(*(_text(session, server.url, p) for p in prompts(count)))
            seconds = max(times[-1] for _, times in found) - start_s
            gaps = np.concatenate([np.diff(times) for _, times in found])
            middle, late = map(float, np.percentile(gaps, [50, 99]))
            first = statistics.median(times[0] - start_s for _, times in found)
            same = sum(tokens == own for (tokens, _), own in zip(found, expected, strict=False))
            total = sum(len(tokens) for tokens, _ in found) / seconds
            rows.append(Texts(f"`--memory {memory}`", count, total, first, middle, late, same))
    return rows


async def _text(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return a text's tokens, and when each came."""
    asked = {"model": "chat", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logit_bias": NO_END}
    tokens, times = list[int](), list[float]()
    async with session.post(f"{url}/v1/completions", json={**asked, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.content:
            if b"token_ids" in line:
                tokens += _tokens_of(line)
                times.append(time.perf_counter())
    return tokens, times


def _tokens_of(event: bytes) -> list[int]:
    found: list[int] = msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["token_ids"]
    return found


def _sections(rows: Sequence[Texts], notes: Sequence[str]) -> list[str]:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds * 1e3:.1f}"

    header = ("", "texts at once", "tokens/s", "first token ms", "between p50 ms", "p99 ms", "equal texts")
    table = [
        [
            row.way,
            str(row.count),
            f"{row.tokens_per_s:.0f}",
            ms(row.first_s),
            ms(row.between_p50_s),
            ms(row.between_p99_s),
            "" if row.same is None else f"{row.same} of {row.count}",
        ]
        for row in rows
    ]
    return [
        f"{ABOUT}; its weights are 134 MB. Prompts of {PROMPT} tokens, {TOKENS} tokens each, streamed by"
        " `/v1/completions`; a text is equal if its tokens are those of transformers' loop on the GPU for this prompt"
        " alone. The loop has the same batch from the start to the end.\n",
        markdown_table(header, table),
        *(f"{note}\n" for note in notes),
    ]


TITLE = "Texts on a GPU, token by token"
STEP = steps.Step("benchmarks.gpu.texts", TITLE, Texts, cells, measure, _sections, cell_s=120.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))

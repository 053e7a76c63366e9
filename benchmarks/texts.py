"""Generated texts: a step of a small language model beside ONNX Runtime's, and tokens per second over HTTP.

ONNX Runtime is left out where it is not installed (`pip install 'cohabit[bench]'`). One thread computes.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import numpy as np
import torch
from rich.console import Console

from benchmarks.language_model import ABOUT, PROMPT, folder_of_model, imported, stream_text
from benchmarks.programs import loaded, onnxruntime_call
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import serve_command, serving
from benchmarks.turns import in_turns, seconds_of
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import open_store
from cohabit.server.config.values import shape_buckets
from cohabit.server.importing.huggingface import from_folder
from cohabit.server.importing.huggingface_inputs import Lengths

MOST_TOKENS, MAX_BATCH = 512, 8
STEPS = ((1, 1, 128), (8, 1, 128), (8, 1, 512), (1, 64, 128))
"""Texts, new tokens of each, tokens before them."""
WARM_UP = 2
"""Turns that do not count."""
TEXTS = (1, 2, 4, 8)
MEMORIES = ("1GiB", "200MiB")
OURS, EAGER, PEER = "this", "eager PyTorch", "ONNX Runtime"
_GENERATE = """
import sys, time, torch, transformers
torch.set_num_threads(1)
folder, texts, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:])
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
ids = torch.randint(3, 8000, (texts, prompt))
given = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0)
with torch.inference_mode():
    model.generate(ids, max_new_tokens=4, **given)
    start_s = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, **given)
print(texts * tokens / (time.perf_counter() - start_s))
"""

Way = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.texts", __doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each engine (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=150, help="of each text (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    repository = options.folder / "texts"
    imported(options.folder, repository, MAX_BATCH, MOST_TOKENS)
    console = Console(stderr=True)
    sections = [f"{ABOUT}, in one thread.\n", *_steps(options, console), *_texts(options, repository, console)]
    publish(options, "Texts, token by token", sections)
    return 0


def _steps(options: argparse.Namespace, console: Console) -> list[str]:
    """Compare a step, with everything resident, in turns."""
    subject = from_folder(folder_of_model(options.folder), (), Lengths(most=MOST_TOKENS))
    archive = options.folder / "texts" / "chat" / "1" / "model.pt2"
    assert subject.decoding is not None
    buckets = shape_buckets(subject.decoding.shape_buckets)
    cache = options.folder / "cache" / "weights"
    lowered = lower(archive, "chat", [1, 2, 4, 8], cache, options=Options(packed=True), shape_buckets=buckets)
    store = open_store("ram", lowered.weights_path, lowered.manifest)
    rows = []
    for texts, count, before in STEPS:
        console.print(f"step of {texts} x {count} after {before}")
        draws = torch.Generator().manual_seed(0)
        given = {
            "input_ids": torch.randint(3, 8000, (texts, count), generator=draws),
            "length": torch.full((texts,), before),
            "past": torch.randn((texts, 16, 8, before, 64), generator=draws),
        }
        bucket = min(
            b for b in lowered.buckets if b.batch >= texts and b.sizes[0] >= count and b.sizes[1] >= before
        )
        with loaded(lowered, bucket, resident_plan(lowered.graphs[bucket]), None, store) as program:
            inputs = [given[port.name] for port in lowered.inputs]
            ways: dict[str, Way] = {OURS: partial(program.run, inputs), EAGER: partial(subject.module, **given)}
            if find_spec("onnxruntime") is not None:
                ways[PEER] = onnxruntime_call(subject.module, given, threads=1)
            timed = {way: partial(seconds_of, call) for way, call in ways.items()}
            with torch.inference_mode():
                in_turns(timed, WARM_UP)
                found = in_turns(timed, options.rounds)
        seconds = {way: statistics.median(each) for way, each in found.items()}
        cells = [f"{seconds[way] * 1e3:.1f}" for way in ways]
        ratios = [f"{seconds[OURS] / seconds[way]:.2f}" for way in ways if way != OURS]
        rows.append([f"{texts} x {count} after {before}", *cells, *ratios])
    store.close()
    header = [
        "texts x tokens, after",
        *(f"{way} ms" for way in ways),
        *(f"over {way}" for way in ways if way != OURS),
    ]
    about = f"A step, all weights resident: medians of {options.rounds} turns.\n"
    return [about, markdown_table(header, rows)]


def _texts(options: argparse.Namespace, repository: Path, console: Console) -> list[str]:
    """Measure texts that are generated together, and transformers' own loop over the same batch."""
    rows = []
    for memory in MEMORIES:
        rows += asyncio.run(_served(options, repository, memory, console))
    for texts in TEXTS:
        console.print(f"transformers, {texts} texts")
        arguments = [str(folder_of_model(options.folder)), str(texts), str(PROMPT), str(options.tokens)]
        done = subprocess.run(
            [sys.executable, "-c", _GENERATE, *arguments], check=True, capture_output=True, text=True
        )
        rows.append(["transformers `generate`", str(texts), f"{float(done.stdout):.1f}", "", "", ""])
    header = ["", "texts at once", "tokens/s", "first token ms", "between tokens p50 ms", "p99 ms"]
    about = (
        f"Prompts of {PROMPT} tokens, {options.tokens} tokens each, streamed by `/v1/completions`; client, front end"
        " and engine share the CPUs. Tokens per second are counted from the first request to the last token. The loop"
        " of transformers has the same batch from the start to the end, in a process of its own.\n"
    )
    return [about, markdown_table(header, rows)]


async def _served(options: argparse.Namespace, repository: Path, memory: str, console: Console) -> list[list[str]]:
    command = serve_command(repository, memory, None, options.folder / "cache", "--threads", "1")
    rows = []
    async with serving(command) as server, aiohttp.ClientSession() as session:
        await stream_text(session, server.url, 99, 8)
        for texts in TEXTS:
            console.print(f"{memory}, {texts} texts")
            start_s = time.perf_counter()
            found = await asyncio.gather(
                *(stream_text(session, server.url, n, options.tokens) for n in range(texts))
            )
            total = sum(map(len, found)) / (max(times[-1] for times in found) - start_s)
            gaps = np.concatenate([np.diff(times) for times in found]) * 1e3
            first = statistics.median(times[0] - start_s for times in found) * 1e3
            middle, late = np.percentile(gaps, [50, 99])
            rows.append(
                [f"`--memory {memory}`", str(texts), f"{total:.1f}", f"{first:.0f}", f"{middle:.1f}", f"{late:.1f}"]
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())

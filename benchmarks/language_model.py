"""A small language model for benchmarks: a Llama with random weights, as a folder of transformers and as an entry."""

import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import torch

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
ABOUT = "A Llama of 33.6 million parameters (8 layers of 512, 8 heads, 8,192 tokens), random weights, float32"
PROMPT = 64
NO_END = {"2": -100}
"""The bias that keeps a text from ending."""


def folder_of_model(root: Path) -> Path:
    """Return the model's folder, which is written where it is not there."""
    import transformers

    folder = root / "language-model"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
        model.save_pretrained(folder)
    return folder


def imported(root: Path, repository: Path, max_batch: int, most_tokens: int) -> None:
    """Make the entry `chat` of a repository, unless it is there."""
    if (repository / "chat").is_dir():
        return
    command = [sys.executable, "-m", "cohabit.server.cli", "import", str(folder_of_model(root)), "--name", "chat"]
    command += ["--repository", str(repository), "--max-batch", str(max_batch), "--cache", str(root / "cache")]
    subprocess.run([*command, "--max-sequence-length", str(most_tokens), "--threads", "1"], check=True)


async def stream_text(session: aiohttp.ClientSession, url: str, seed: int, tokens: int) -> list[float]:
    """Have `chat` continue a random prompt by so many tokens. Returns when each of them came (`time.perf_counter`)."""
    prompt = np.random.default_rng(seed).integers(3, 8000, PROMPT).tolist()
    asked = {"model": "chat", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logit_bias": NO_END}
    async with session.post(f"{url}/v1/completions", json={**asked, "stream": True}) as response:
        response.raise_for_status()
        return [time.perf_counter() async for line in response.content if b"token_ids" in line]

"""Similarity of sentences, computed by a served sentence embedder."""

from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tritonclient.http import InferInput
from tritonclient.utils import InferenceServerException

from cohabit.loadgen.client import connected, model_metadata
from cohabit.loadgen.errors import ModelRefused, ServerFailed
from cohabit.loadgen.zoo import not_installed

EXAMPLES = (
    "A cat is sleeping on the sofa.",
    "The kitten naps on the couch.",
    "The central bank raised interest rates again.",
)


async def embed(url: str, model: str, sentences: Sequence[str], timeout_s: float = 30.0) -> NDArray[np.float32]:
    """Return the model's embeddings, [len(sentences), width], cut or padded to the length that it takes."""
    try:
        from cohabit.loadgen.zoo.tokens import tokenize
    except ModuleNotFoundError as error:
        raise not_installed("loadgen sentences", error) from error
    async with connected(url, max_in_flight=1, timeout_s=timeout_s) as client:
        length = token_length(await model_metadata(client, url, model))
        inputs = []
        for name, values in zip(("input_ids", "attention_mask"), tokenize(sentences, length), strict=True):
            tensor = InferInput(name, list(values.shape), "INT64")
            tensor.set_data_from_numpy(values, binary_data=True)
            inputs.append(tensor)
        try:
            result = await client.infer(model, inputs)
        except InferenceServerException as error:
            raise ServerFailed(f"{model} at {url} refuses the sentences: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailed(f"{model} at {url} does not answer: {error or type(error).__name__}") from error
    embedding: NDArray[np.float32] | None = result.as_numpy("embedding")
    if embedding is None:
        raise ModelRefused(f"{model} at {url} has no output named embedding")
    return embedding


def token_length(metadata: dict[str, Any]) -> int:
    """Return how many tokens a sentence has in this model, from its metadata."""
    shapes = {spec["name"]: [int(extent) for extent in spec["shape"]] for spec in metadata["inputs"]}
    if set(shapes) != {"input_ids", "attention_mask"} or len(shapes["input_ids"]) != 2:
        raise ModelRefused(
            f"{metadata['name']}: a sentence embedder takes input_ids and attention_mask, this takes {shapes}"
        )
    length = shapes["input_ids"][1]
    return 128 if length == -1 else length


def print_similarities(sentences: Sequence[str], embeddings: NDArray[np.float32], console: Console) -> None:
    """Print the cosine of each pair of sentences."""
    unit_BH = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    similarity_BB = unit_BH @ unit_BH.T
    table = Table(title="Similarity (cosine)", title_justify="left")
    table.add_column("sentence")
    for k in range(len(sentences)):
        table.add_column(str(k + 1), justify="right")
    for k, sentence in enumerate(sentences):
        table.add_row(f"{k + 1}  {sentence}", *(f"{value:.3f}" for value in similarity_BB[k]))
    console.print(table)

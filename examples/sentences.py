"""Compare sentences by their embeddings from a served MiniLM.

loadgen prepare models --zoo minilm && cohabit serve models --memory 64MiB
python examples/sentences.py localhost:8000 "A cat sleeps." "The kitten naps." "Rates rise."
"""

import sys
from collections.abc import Sequence

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray

from cohabit.loadgen.zoo.tokens import tokenize

SENTENCES = (
    "A cat is sleeping on the sofa.",
    "The kitten naps on the couch.",
    "The central bank raised interest rates again.",
)


def embed(address: str, sentences: Sequence[str], model: str = "minilm") -> NDArray[np.float32]:
    """Return unit vectors, [len(sentences), width]."""
    client = triton.InferenceServerClient(address)
    length = int(client.get_model_metadata(model)["inputs"][0]["shape"][1])
    tokens = tokenize(sentences, 128 if length == -1 else length)
    inputs = []
    for name, values in zip(("input_ids", "attention_mask"), tokens, strict=True):
        inputs.append(triton.InferInput(name, list(values.shape), "INT64"))
        inputs[-1].set_data_from_numpy(values)
    embedding_BH: NDArray[np.float32] = client.infer(model, inputs).as_numpy("embedding")
    unit_BH: NDArray[np.float32] = embedding_BH / np.linalg.norm(embedding_BH, axis=1, keepdims=True)
    return unit_BH


def table(sentences: Sequence[str], embeddings: NDArray[np.float32]) -> str:
    """Return a table with the cosine of each pair of sentences."""
    rows = zip(sentences, embeddings @ embeddings.T, strict=True)
    return "\n".join(f"{sentence:50}" + "".join(f"{cosine:8.3f}" for cosine in row) for sentence, row in rows)


if __name__ == "__main__":
    given = sys.argv[2:] or SENTENCES
    print(table(given, embed(sys.argv[1] if len(sys.argv) > 1 else "localhost:8000", given)))

"""What an agent asks of its memory: embed notes, find those near a question, order them, and answer with them.

python examples/agent/client.py [ADDRESS]
"""

import json
import sys
from typing import Any
from urllib.request import urlopen

NOTES = (
    "The deploy key is rotated on the first Monday of each month.",
    "Ada prefers tea without milk.",
    "Builds run on two cores; tests that need a GPU are skipped there.",
    "The staging database is restored from production every night.",
)
QUESTION = "When do we change the deploy key?"


def post(address: str, path: str, **body: Any) -> Any:
    with urlopen(f"http://{address}/v1/{path}", json.dumps(body).encode()) as answer:
        return json.load(answer)


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
    texts = [*NOTES, QUESTION]
    *notes, question = (
        item["embedding"] for item in post(address, "embeddings", model="embedder", input=texts)["data"]
    )
    cosines = [sum(a * b for a, b in zip(note, question, strict=True)) for note in notes]
    near = sorted(zip(cosines, NOTES, strict=True), reverse=True)[:3]
    print(*(f"{cosine:.2f}  {note}" for cosine, note in near), sep="\n")
    found = post(address, "rerank", model="reranker", query=QUESTION, documents=[note for _, note in near])[
        "results"
    ]
    note = near[found[0]["index"]][1]
    messages = [{"role": "user", "content": f"{note}\n{QUESTION}"}]
    answer = post(address, "chat/completions", model="chat", messages=messages, max_tokens=16)
    print(answer["usage"]["completion_tokens"], "tokens:", repr(answer["choices"][0]["message"]["content"]))


if __name__ == "__main__":
    main()

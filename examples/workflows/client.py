"""Send an image through each workflow, first model by model, then as one request: python client.py [ADDRESS].

The answers are the same. As one request, the crops stay in the server.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray

Array = NDArray[np.float32]


def ask(client: triton.InferenceServerClient, name: str, image: Array) -> dict[str, Array]:
    sent = triton.InferInput("image", list(image.shape), "FP32").set_data_from_numpy(image)
    answer = client.infer(name, [sent])
    return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def ask_models(client: triton.InferenceServerClient, models: Sequence[str], image: Array) -> dict[str, Array]:
    outputs: dict[str, Array] = {}
    for model in models:
        found = ask(client, model, image)
        image = found.pop("crop", image)
        outputs |= {f"{model}_{key}": value for key, value in found.items()}
    return outputs


def main() -> None:
    client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8000")
    for entry in client.get_model_repository_index():
        config = client.get_model_config(entry["name"])
        models = [step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", [])]
        if not models:
            continue
        image = np.random.default_rng(0).random((1, *map(int, config["input"][0]["dims"])), np.float32)
        start_s = time.perf_counter()
        outputs = ask_models(client, models, image)
        middle_s = time.perf_counter()
        whole = ask(client, entry["name"], image)
        end_s = time.perf_counter()
        is_same = all(np.array_equal(value, outputs[key]) for key, value in whole.items())
        print(
            f"{entry['name']:12}{len(models)} models {(middle_s - start_s) * 1e3:6.1f} ms, as one request"
            f" {(end_s - middle_s) * 1e3:6.1f} ms, {'the same answers' if is_same else 'other answers'}"
        )


if __name__ == "__main__":
    main()

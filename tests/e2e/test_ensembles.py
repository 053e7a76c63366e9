"""An ensemble of real models: the bits of its steps, and every request answered while a step is unloaded and loaded."""

import re
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support.e2e.serving import eventually, infer, repository_index
from tests.support.e2e.stacks import PAUSE_S, WIDTH, Array, Stacks, controlled
from tests.support.server.ensembles import config_text, put, step, tensor

REASONS = re.compile(
    r"ensemble 'pipeline', step 2 \('b'\): .*unload|"
    r"'pipeline' (has no available versions|version 1 is not at ready state): step 2 \('b'\) is not ready: unload|"
    r"model 'pipeline' is not ready: step 2 \('b'\) is still loading"
)


def x_of(batch: int) -> Array:
    return np.random.default_rng(batch).standard_normal((batch, WIDTH)).astype(np.float32)


def request_bytes(address: str) -> float:
    """Return the bytes of shared memory that unanswered requests hold."""
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        (line,) = (line for line in page.read().decode().splitlines() if line.startswith("cohabit_request_memory"))
    return float(line.rpartition(" ")[2])


def test_every_request_is_answered_with_the_steps_bits_or_refused_with_the_reason(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    for seed, name in enumerate("ab"):
        stacks.put(tmp_path, name, seed)
    settings = {"load_models": ("a",), "batch_sizes": (1, 2), "grpc_port": 0}
    with controlled(tmp_path, "20MiB", plans, **settings) as (server, client):
        output = client.get_model_metadata("a")["outputs"][0]["name"]
        tensors = tensor("input", "X", dims=str(WIDTH)) + tensor("output", "Y", dims=str(WIDTH))
        steps = step("a", {"x": "X"}, {output: "between"}), step("b", {"x": "between"}, {output: "Y"})
        put(tmp_path, "pipeline", config_text(tensors, *steps, head="platform: 'ensemble' max_batch_size: 2\n"))
        client.load_model("pipeline")
        assert {entry["state"] for entry in repository_index(server.address).values()} == {"READY"}, (
            "with its steps"
        )
        expected: dict[int, Array] = {}
        for batch in (1, 2):
            between = infer(server.address, "a", {"x": x_of(batch)})[output]
            expected[batch] = infer(server.address, "b", {"x": between})[output]
            np.testing.assert_array_equal(
                infer(server.address, "pipeline", {"X": x_of(batch)})["Y"], expected[batch]
            )
            with triton_grpc.InferenceServerClient(server.grpc_address) as grpc:
                sent = triton_grpc.InferInput("X", [batch, WIDTH], "FP32").set_data_from_numpy(x_of(batch))
                np.testing.assert_array_equal(grpc.infer("pipeline", [sent]).as_numpy("Y"), expected[batch])

        stop, refusals, answered = threading.Event(), set[str](), Counter[int]()

        def ask_on(batch: int) -> None:
            while not stop.is_set():
                try:
                    answer = infer(server.address, "pipeline", {"X": x_of(batch)})["Y"]
                    np.testing.assert_allclose(answer, expected[batch], rtol=1e-4, atol=1e-5)
                    answered[batch] += 1
                except InferenceServerException as error:
                    refusals.add(str(error))
                time.sleep(PAUSE_S)

        with ThreadPoolExecutor(2) as clients:
            asking = [clients.submit(ask_on, batch) for batch in (1, 2)]
            try:
                client.unload_model("b")
                index = repository_index(server.address)["pipeline"]
                assert (index["state"], index["reason"]) == ("UNAVAILABLE", "step 2 ('b') is not ready: unloaded")
                assert not client.is_model_ready("pipeline")
                eventually(lambda: bool(refusals))
                client.load_model("b")
                assert client.is_model_ready("pipeline")
                before = answered.copy()
                eventually(lambda: all(answered[batch] > before[batch] for batch in (1, 2)))
            finally:
                stop.set()
            for each in asking:
                each.result()
        assert [text for text in refusals if not REASONS.search(text)] == []
        eventually(lambda: request_bytes(server.address) == 0)

"""Sequences: what a model keeps from one request to the next, through Triton's unchanged clients."""

import asyncio
import os
import random
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from numpy.typing import NDArray
from torch import nn
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from cohabit.loadgen.load import Load
from cohabit.loadgen.run import run_load
from tests.support.e2e.serving import Process, Running, ask, eventually, metric, process, serving
from tests.support.runtime import models

WIDTH = 16
SUM = """
max_batch_size: 4
sequence_batching {
  max_sequence_idle_microseconds: 600000000
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
  control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
  control_input { name: "last" control { kind: CONTROL_SEQUENCE_END bool_false_true: [false, true] } }
  control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: 16 }
}
"""
SPEECH = """
sequence_batching {
  max_sequence_idle_microseconds: 600000000
  oldest { max_candidate_sequences: 4 }
  state { input_name: "hidden" output_name: "next" data_type: TYPE_FP32 dims: [2, 24]
          initial_state { name: "first" data_type: TYPE_FP32 dims: [2, 24] data_file: "first.bin" } }
}
"""
FIRST = np.random.default_rng(1).normal(size=(1, 2, 24)).astype(np.float32)


class Sum(nn.Module):
    """Sums what has come in a sequence, and tells it what the server says of its requests."""

    def forward(
        self,
        x: torch.Tensor,
        start: torch.Tensor,
        ready: torch.Tensor,
        last: torch.Tensor,
        id: torch.Tensor,
        before: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        after = before * ready + x
        said = torch.cat([start, last.to(start.dtype), id.to(start.dtype)], 1)
        return {"y": after * 2, "after": after, "said": said}


class Speech(nn.Module):
    """Two recurrent layers over a piece of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(WIDTH, 24, 2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        y, after = self.layers(x, hidden.transpose(0, 1).contiguous())
        return {"next": after.transpose(0, 1).contiguous(), "y": self.head(y).softmax(-1)}


def made(module: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return module().eval()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sequences")
    flags = {"start": torch.zeros(2, 1), "ready": torch.ones(2, 1, dtype=torch.int32)}
    flags |= {"last": torch.zeros(2, 1, dtype=torch.bool), "id": torch.ones(2, 1, dtype=torch.int64)}
    row = torch.zeros(2, WIDTH)
    models.export(made(Sum), {"x": row, **flags, "before": row.clone()}, root / "sum" / "1" / "model.pt2")
    example = {"x": torch.zeros(2, 3, WIDTH), "hidden": torch.zeros(2, 2, 24)}
    models.export(made(Speech), example, root / "speech" / "1" / "model.pt2")
    (root / "sum" / "config.pbtxt").write_text(SUM)
    (root / "speech" / "config.pbtxt").write_text(SPEECH)
    (root / "speech" / "initial_state").mkdir()
    FIRST.tofile(root / "speech" / "initial_state" / "first.bin")
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(repository: Path, cache: Path) -> Iterator[Running]:
    with serving(repository, "4MiB", cache, batch_sizes=(1, 2, 4), grpc_port=0) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address, concurrency=16, network_timeout=120.0) as client:
        yield client


def step(
    client: Any, model: str, x: NDArray[Any], sequence: Any, api: Any = triton, **flags: bool
) -> Mapping[str, Any]:
    tensor = api.InferInput("x", list(x.shape), np_to_triton_dtype(x.dtype))
    tensor.set_data_from_numpy(x)
    result = client.infer(model, [tensor], sequence_id=sequence, **flags)
    return {name: result.as_numpy(name) for name in ("y", "said") if result.as_numpy(name) is not None}


def alone(pieces: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """What eager torch answers to a sequence of the speech model."""
    module, hidden, answers = made(Speech), torch.from_numpy(FIRST), []
    for piece in pieces:
        with torch.inference_mode():
            outputs = module(torch.from_numpy(piece), hidden)
        hidden = outputs["next"]
        answers.append(outputs["y"].numpy())
    return answers


def test_sequences_under_load_are_answered_as_if_each_were_alone(
    server: Running,
) -> None:
    draws = random.Random(0)
    lengths = {f"caller {n}" if n % 2 else n + 1: draws.randint(1, 6) for n in range(60)}
    noise = np.random.default_rng(0)
    pieces = {
        key: [noise.normal(size=(1, 3, WIDTH)).astype(np.float32) for _ in range(n)] for key, n in lengths.items()
    }

    def run(sequence: int | str) -> list[NDArray[Any]]:
        own = pieces[sequence]
        flags = [{"sequence_start": k == 0, "sequence_end": k == len(own) - 1} for k in range(len(own))]
        with client_of(server) as client:  # its connections belong to one thread
            return [step(client, "speech", x, sequence, **f)["y"] for x, f in zip(own, flags, strict=True)]

    with ThreadPoolExecutor(16) as callers:
        answers = dict(zip(pieces, callers.map(run, pieces), strict=True))
    for sequence, own in pieces.items():
        for got, expected in zip(answers[sequence], alone(own), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert metric(server.metrics_address, "cohabit_sequences", "speech") == 0, "all have ended"


def test_clients_see_neither_states_nor_control_inputs(client: triton.InferenceServerClient) -> None:
    described = client.get_model_metadata("sum")
    assert [tensor["name"] for tensor in described["inputs"]] == ["x"]
    assert sorted(tensor["name"] for tensor in described["outputs"]) == ["said", "y"]
    config = client.get_model_config("sum")
    assert [tensor["name"] for tensor in config["input"]] == ["x"]
    assert config["sequence_batching"]["state"][0]["input_name"] == "before"
    assert "sequence" in client.get_server_metadata()["extensions"]


def test_the_model_is_told_where_a_request_stands(client: triton.InferenceServerClient) -> None:
    x = np.ones((1, WIDTH), np.float32)
    first = step(client, "sum", x, 7, sequence_start=True)
    second = step(client, "sum", x, 7)
    third = step(client, "sum", x, 7, sequence_end=True)
    assert [answer["said"].tolist() for answer in (first, second, third)] == [[[1, 0, 7]], [[0, 0, 7]], [[0, 1, 7]]]
    assert [answer["y"][0, 0] for answer in (first, second, third)] == [2, 4, 6]
    assert step(client, "sum", x, 7, sequence_start=True, sequence_end=True)["y"][0, 0] == 2, "begun again"
    with pytest.raises(InferenceServerException, match="must be a number from"):
        step(client, "sum", x, "seven", sequence_start=True)


def test_a_sequence_that_begins_again_has_its_first_state(client: triton.InferenceServerClient) -> None:
    x = np.ones((1, WIDTH), np.float32)
    assert [step(client, "sum", x, 8, sequence_start=start)["y"][0, 0] for start in (True, False, True)] == [
        2,
        4,
        2,
    ]
    step(client, "sum", x, 8, sequence_end=True)


@pytest.mark.parametrize(
    ("sequence", "rows", "flags", "message"),
    [
        (9, 1, {}, r"sequence 9 .* must specify the START flag on the first request"),
        (0, 1, {"sequence_start": True}, "must specify a non-zero or non-empty correlation ID"),
        ("", 1, {}, "must specify a non-zero or non-empty correlation ID"),
        ("x" * 129, 1, {"sequence_start": True}, "has 129 characters, the limit is 128"),
        (9, 2, {"sequence_start": True}, "must specify batch-size 1, got 2"),
    ],
)
def test_what_is_no_step_of_a_sequence_is_refused(
    client: triton.InferenceServerClient, sequence: Any, rows: int, flags: dict[str, bool], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message):
        step(client, "sum", np.ones((rows, WIDTH), np.float32), sequence, **flags)


def test_the_requests_of_a_stream_reach_their_sequences_in_order(server: Running) -> None:
    """Triton's example: two sequences over one stream; answers come in the order of the requests."""
    assert server.grpc_address is not None
    values = list(range(1, 30))
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for n, value in enumerate(values):
            for sequence, sign in ((11, 1), (12, -1)):
                tensor = triton_grpc.InferInput("x", [1, WIDTH], "FP32")
                tensor.set_data_from_numpy(np.full((1, WIDTH), sign * value, np.float32))
                client.async_stream_infer(
                    "sum",
                    [tensor],
                    request_id=f"{sequence}_{n}",
                    sequence_id=sequence,
                    sequence_start=n == 0,
                    sequence_end=n == len(values) - 1,
                )
        got: dict[str, float] = {}
        for _ in range(2 * len(values)):
            result, error = answers.get(timeout=60)
            assert error is None, error
            got[result.get_response().id] = result.as_numpy("y")[0, 0]
    sums = np.cumsum(values)
    assert got == {f"{s}_{n}": sign * 2 * sums[n] for s, sign in ((11, 1), (12, -1)) for n in range(len(values))}


def test_idle_sequences_are_forgotten(repository: Path, cache: Path, tmp_path: Path) -> None:
    root = linked(repository, tmp_path, SUM.replace("600000000", "1"))
    x = np.ones((1, WIDTH), np.float32)
    with serving(root, "4MiB", cache, batch_sizes=(1, 2, 4)) as server, client_of(server) as client:
        step(client, "sum", x, 1, sequence_start=True)
        with pytest.raises(InferenceServerException, match=r"after 1e-06 s without a request"):
            step(client, "sum", x, 1)
        step(client, "sum", x, 2, sequence_start=True)
        eventually(lambda: metric(server.metrics_address, "cohabit_sequences", "sum") == 0)


def test_states_have_a_bound_and_the_least_recently_used_makes_room(
    repository: Path, cache: Path, tmp_path: Path
) -> None:
    root, x = linked(repository, tmp_path, SUM), np.ones((1, WIDTH), np.float32)
    each = WIDTH * 4 + 1024
    with (
        serving(root, "4MiB", cache, batch_sizes=(1, 2, 4), queue_bytes=20 * each) as server,
        client_of(server) as client,
    ):
        for sequence in range(1, 21):
            step(client, "sum", x, sequence, sequence_start=True)

        def is_begun() -> bool:
            """It is refused as long as all others have been used within a second."""
            try:
                return bool(step(client, "sum", x, 21, sequence_start=True)["y"][0, 0] == 2)
            except InferenceServerException as error:
                if "leaves less than the 1.1 KiB that a new or growing" not in str(error):
                    raise
                return False

        eventually(is_begun)
        assert metric(server.metrics_address, "cohabit_state_bytes", "sum") == 20 * each
        assert step(client, "sum", x, 20)["y"][0, 0] == 4, "those that are known go on"
        with pytest.raises(InferenceServerException, match="earlier if other sequences need its memory"):
            step(client, "sum", x, 1)


@pytest.fixture(scope="module")
def summing(repository: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with an engine process, which serves the model that sums."""
    root = linked(repository, tmp_path_factory.mktemp("summing"), SUM)
    with process(root, "4MiB", cache, "--batch-sizes", "1,2,4") as running:
        running.until_ready()
        yield running


@pytest.mark.parametrize("api", [triton, triton_grpc])
@pytest.mark.parametrize("why", ["the window is too small", "the file has shrunk"])
def test_a_request_whose_answer_cannot_be_written_leaves_its_sequence_as_it_was(
    summing: Process, api: Any, why: str
) -> None:
    x, name, nbytes = np.ones((1, WIDTH), np.float32), f"cohabit-test-{uuid.uuid4().hex}", WIDTH * 4
    with shared_file(name, nbytes) as file:
        address = summing.address if api is triton else summing.grpc_address
        with api.InferenceServerClient(address) as client:
            client.register_system_shared_memory("out", f"/{name}", nbytes)

            def ask(window_bytes: int, **flags: bool) -> float:
                tensor, wanted = api.InferInput("x", [1, WIDTH], "FP32"), api.InferRequestedOutput("y")
                tensor.set_data_from_numpy(x)
                wanted.set_shared_memory("out", window_bytes)
                client.infer("sum", [tensor], outputs=[wanted], sequence_id=5, **flags)
                return float(np.frombuffer(file.read_bytes(), np.float32)[0])

            assert ask(nbytes, sequence_start=True) == 2
            if why == "the file has shrunk":
                os.truncate(file, 4)
            for flags in ({}, {"sequence_end": True}, {"sequence_start": True}):
                with pytest.raises(InferenceServerException, match=r"should be at least 64 bytes|has shrunk"):
                    ask(nbytes if why == "the file has shrunk" else 4, **flags)
            os.truncate(file, nbytes)
            assert ask(nbytes) == 4, "neither continued, nor ended, nor begun again"
            client.unregister_system_shared_memory("out")


@contextmanager
def shared_file(name: str, nbytes: int) -> Iterator[Path]:
    """A client's shared memory."""
    path = Path("/dev/shm") / name
    path.write_bytes(bytes(nbytes))
    try:
        yield path
    finally:
        path.unlink()


def test_a_sequence_whose_engine_died_is_an_error_that_says_so(summing: Process) -> None:
    x = np.ones((1, WIDTH), np.float32)
    with client_of(summing) as client:
        assert step(client, "sum", x, 5, sequence_start=True)["y"][0, 0] == 2
        summing.engine().kill()
        eventually(lambda: ask(summing.address, "GET", "/v2/health/ready")[0] == 200)
        with pytest.raises(InferenceServerException, match=r"No such sequence is known.* the engine restarts"):
            step(client, "sum", x, 5)
        assert step(client, "sum", x, 5, sequence_start=True)["y"][0, 0] == 2


def client_of(server: Running | Process) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.address, network_timeout=120.0)


def linked(repository: Path, root: Path, config: str) -> Path:
    """A repository with the model that sums, configured differently."""
    (root / "sum" / "1").mkdir(parents=True)
    os.link(repository / "sum" / "1" / "model.pt2", root / "sum" / "1" / "model.pt2")
    (root / "sum" / "config.pbtxt").write_text(config)
    return root


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_loadgen_sends_sequences_of_one_request(server: Running, scheme: str) -> None:
    address = f"http://{server.address}" if scheme == "http" else f"grpc://{server.grpc_address}"
    load = Load(rate_per_s=50.0, duration_s=1.0, warmup_s=0.0)
    report = asyncio.run(run_load(address, load))
    assert (report.completed > 0, report.errors) == (True, {})
    assert metric(server.metrics_address, "cohabit_sequences", "sum") == 0

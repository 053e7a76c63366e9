"""Two engines that Ray Serve places: their answers are those of one server, also while an engine is killed."""

import gzip
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as triton

from cohabit.server.scale.engine import ServedEngine
from cohabit.server.scale.routing import ForwardedRequest
from cohabit.server.scale.settings import plan_engines
from tests.e2e.serving import ROOT, Arrays, _tensor, ask, infer, process, repository_index
from tests.e2e.stacks import WIDTH, Stacks

MODELS = {"a": 0, "b": 1, "c": 2, "d": 3}
MEMORY = "8MiB"
START_S = 900.0
"""Ray starts six processes, and each engine three."""


@dataclass(frozen=True)
class Scaled:
    """A running `cohabit scale`."""

    address: str
    popen: subprocess.Popen[str]
    expected: dict[tuple[str, int], Arrays]
    """Outputs of one server with all models, by model and input."""

    def replica(self, engine: str) -> psutil.Process:
        """The actor of an engine."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        return next(c for c in children if any(f"cohabit:{engine}" in part for part in c.cmdline()))

    def answers(self, model: str, number: int) -> bool:
        """Ask once; whether the answer has the bits of the one server's."""
        got, wanted = infer(self.address, model, inputs(number)), self.expected[model, number]
        return got.keys() == wanted.keys() and all(np.array_equal(got[name], wanted[name]) for name in wanted)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def inputs(number: int) -> Arrays:
    return {"x": np.random.default_rng(number).standard_normal((1, WIDTH), dtype=np.float32)}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    folder = tmp_path_factory.mktemp("scale")
    repository, cache = folder / "models", folder / "cache"
    stacks = Stacks(folder)
    for name, seed in MODELS.items():
        stacks.put(repository, name, seed)
    (folder / "rates").write_text("a=5\nb=1\nc=1\nd=1\n")  # `a` has two copies
    same = ("--batch-sizes", "1", "--threads", "1")
    with process(repository, MEMORY, cache, *same) as server:
        server.until_ready()
        expected = {(m, n): infer(server.address, m, inputs(n)) for m in MODELS for n in range(3)}
    command = [sys.executable, "-m", "cohabit.server.cli", "scale", str(repository), "--memory", MEMORY]
    command += ["--cache", str(cache), "--replicas", "2", "--copies", "2", "--rates", str(folder / "rates"), *same]
    command += ["--http-port", str(free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        ) as popen,
    ):
        try:
            assert popen.stdout is not None
            line = next((text for text in popen.stdout if text.startswith("http: ")), None)
            if line is None:
                log.seek(0)
                pytest.fail(log.read())
            yield Scaled(line.partition("http://")[2].strip(), popen, expected)
            popen.send_signal(signal.SIGTERM)
            assert popen.wait(START_S) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)


async def test_an_engine_answers_what_is_forwarded_as_its_server_would(tmp_path: Path) -> None:
    Stacks(tmp_path).put(tmp_path / "models", "a", 0)
    values = {"repository": str(tmp_path / "models"), "memory": MEMORY, "cache": str(tmp_path / "cache")}
    (plan,) = plan_engines({**values, "batch_sizes": "1"}, 1)
    engine = ServedEngine(plan.config)
    try:
        await engine.start()
        body, length = triton.InferenceServerClient.generate_request_body([_tensor("x", inputs(0)["x"])])
        headers = {"inference-header-content-length": str(length), "host": "elsewhere", "content-length": "1"}
        plain = ForwardedRequest("POST", "/v2/models/a/infer", headers, body)
        answer = await engine.answer(plain)
        output = np.frombuffer(answer.body[int(answer.headers["inference-header-content-length"]) :], np.float32)
        packed = {**headers, "content-encoding": "gzip", "accept-encoding": "gzip"}
        zipped = await engine.answer(replace(plain, headers=packed, body=gzip.compress(body)))
        assert (answer.status, output.shape, zipped.headers["content-encoding"]) == (200, (WIDTH,), "gzip")
        assert gzip.decompress(zipped.body) == answer.body
        assert (await engine.answer(ForwardedRequest("GET", "/v2/models/%61/ready", {}, b""))).status == 200
        missing = await engine.answer(ForwardedRequest("GET", "/v2/models/b", {}, b""))
        assert (missing.status, b"'b' is not found" in missing.body) == (404, True)
        engine.check()
    finally:
        if engine._session is not None:
            await engine._session.close()
        assert await engine._server.stop()
        engine._folder.cleanup()


@pytest.mark.scale
def test_every_answer_of_two_engines_has_the_bits_of_one_servers(scaled: Scaled) -> None:
    assert all(scaled.answers(model, number) for model, number in scaled.expected)


@pytest.mark.scale
def test_clients_see_one_server_with_every_model(scaled: Scaled) -> None:
    assert {name for name, entry in repository_index(scaled.address).items() if entry["state"] == "READY"} == set(
        MODELS
    )
    with triton.InferenceServerClient(scaled.address, network_timeout=START_S) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert all(client.is_model_ready(model) for model in MODELS)
        assert client.get_model_metadata("b")["name"] == "b"
        assert len(client.get_inference_statistics("a")["model_stats"]) == 2  # both engines have it
        assert len(client.get_inference_statistics("b")["model_stats"]) == 1
    status, refused = ask(scaled.address, "POST", "/v2/models/nothing/infer", {"inputs": []})
    assert (status, refused["error"]) == (404, "Request for unknown model: 'nothing' is not found")
    assert ask(scaled.address, "POST", "/v2/repository/models/a/unload")[0] == 501


@pytest.mark.scale
def test_every_request_is_answered_while_an_engine_is_killed(scaled: Scaled) -> None:
    killed = scaled.replica("engine-0")
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(scaled.answers, model, number % 3) for number in range(20) for model in MODELS]
        while not any(each.done() for each in asked):
            time.sleep(0.01)
        killed.kill()
        assert all(each.result(START_S) for each in asked)
    assert scaled.replica("engine-0").pid != killed.pid
    assert all(scaled.answers(model, number) for model, number in scaled.expected)


@pytest.mark.scale
def test_engines_that_cannot_load_their_models_end_the_start_with_the_reason(tmp_path: Path) -> None:
    Stacks(tmp_path).put(tmp_path / "models", "a", 0)
    command = [sys.executable, "-m", "cohabit.server.cli", "scale", str(tmp_path / "models"), "--memory", "64KiB"]
    command += ["--replicas", "1", "--cache", str(tmp_path / "cache"), "--http-port", str(free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=START_S, check=False)
    assert ended.returncode == 1
    assert "engine-0: " in ended.stderr
    assert "the budget is 64.0 KiB" in ended.stderr

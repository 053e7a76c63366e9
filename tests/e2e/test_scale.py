"""Two engines that Ray Serve places: their answers are those of one server, also while an engine is killed."""

import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as triton

from cohabit.server.errors import EngineUnavailable, Overloaded
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.scale.engine import EngineAddress, ServedEngine, engine_session
from cohabit.server.scale.routing import ForwardedRequest
from cohabit.server.scale.settings import plan_engines
from tests.support.e2e.serving import Arrays, _tensor, ask, eventually, infer, process, repository_index
from tests.support.e2e.stacks import WIDTH, Stacks

MODELS = {"a": 0, "b": 1, "c": 2, "d": 3}
MEMORY = "8MiB"
START_S = 900.0
"""Ray starts six processes, and each engine three."""
RAY = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}


@dataclass(frozen=True)
class Models:
    """A repository, and what one server with all of its models answers."""

    folder: Path
    """With the repository, its cache and the rates."""
    expected: Mapping[tuple[str, int], Arrays]
    """By model and input."""


@dataclass(frozen=True)
class Scaled:
    """A running server of several engines."""

    address: str
    popen: subprocess.Popen[str]
    expected: Mapping[tuple[str, int], Arrays]

    def engines(self) -> list[psutil.Process]:
        """The actors of the engines."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        return [c for c in children if any("cohabit:Engine" in part for part in _command(c))]

    def answers(self, model: str, number: int) -> bool:
        """Ask once; whether the answer has the bits of the one server's."""
        got, wanted = infer(self.address, model, inputs(number)), self.expected[model, number]
        return got.keys() == wanted.keys() and all(np.array_equal(got[name], wanted[name]) for name in wanted)


def _command(process: psutil.Process) -> list[str]:
    try:
        command: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return command


def _is_ready(address: str) -> bool:
    try:
        return ask(address, "GET", "/v2/health/ready")[0] == 200
    except (OSError, ValueError):  # Ray answers itself until there is an ingress
        return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def inputs(number: int) -> Arrays:
    return {"x": np.random.default_rng(number).standard_normal((1, WIDTH), dtype=np.float32)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("scale")
    stacks = Stacks(folder)
    for name, seed in MODELS.items():
        stacks.put(folder / "models", name, seed)
    (folder / "rates").write_text("a=5\nb=1\nc=1\nd=1\n")  # `a` has two copies
    with process(folder / "models", MEMORY, folder / "cache", "--batch-sizes", "1", "--threads", "1") as server:
        server.until_ready()
        return Models(folder, {(m, n): infer(server.address, m, inputs(n)) for m in MODELS for n in range(3)})


@pytest.fixture(scope="module")
def scaled(models: Models) -> Iterator[Scaled]:
    command = [sys.executable, "-m", "cohabit.server.cli", "scale", str(models.folder / "models")]
    command += ["--memory", MEMORY, "--cache", str(models.folder / "cache"), "--replicas", "2", "--copies", "2"]
    command += ["--rates", str(models.folder / "rates"), "--batch-sizes", "1", "--threads", "1"]
    command += ["--http-port", str(free_port()), "--queue-memory", "4MiB", "--max-body", "8MiB"]
    with started(command, "http: http://") as (address, popen):
        yield Scaled(address, popen, models.expected)
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(START_S) == 0


@contextmanager
def started(command: Sequence[str], mark: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a command that serves; the rest of the line with the mark, and its process."""
    environment = os.environ | RAY
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as popen:
        try:
            assert popen.stdout is not None
            log = []
            for line in popen.stdout:
                log.append(line)
                if mark in line:
                    break
            else:
                pytest.fail("".join(log))
            threading.Thread(target=popen.stdout.read, daemon=True).start()
            yield line.partition(mark)[2].strip(), popen
        finally:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)


async def test_an_engine_answers_what_is_forwarded_as_its_server_would(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    stacks.put(tmp_path / "models", "a", 0)
    values = {"repository": str(tmp_path / "models"), "memory": MEMORY, "cache": str(plans)}
    plan = plan_engines({**values, "batch_sizes": "1"})
    served, memory = ServedEngine(plan.config, "127.0.0.1"), RequestMemory(1 << 20)
    async with engine_session() as session:
        try:
            await served.start(plan.traffic)
            engine = EngineAddress(session, served.url, served.token, memory)
            body, length = triton.InferenceServerClient.generate_request_body([_tensor("x", inputs(0)["x"])])
            headers = {"inference-header-content-length": str(length), "host": "elsewhere", "content-length": "1"}
            plain = ForwardedRequest("POST", "/v2/models/a/infer", headers, body)
            answer = await engine.answer(plain)
            output = np.frombuffer(
                answer.body[int(answer.headers["inference-header-content-length"]) :], np.float32
            )
            packed = {**headers, "content-encoding": "gzip", "accept-encoding": "gzip"}
            zipped = await engine.answer(replace(plain, headers=packed, body=memoryview(gzip.compress(body))))
            assert (answer.status, output.shape, zipped.headers["content-encoding"]) == (200, (WIDTH,), "gzip")
            assert gzip.decompress(zipped.body) == answer.body
            assert (await engine.answer(ForwardedRequest("GET", "/v2/models/%61/ready", {}, b""))).status == 200
            missing = await engine.answer(ForwardedRequest("GET", "/v2/models/b", {}, b""))
            assert (missing.status, b"'b' is not found" in missing.body) == (404, True)
            unload = ForwardedRequest(
                "POST", "/v2/repository/models/a/unload", {"authorization": "of the client"}, b""
            )
            assert (await engine.answer(unload)).status == 200
            other = EngineAddress(session, served.url, "another token", memory)
            assert (await other.answer(plain)).status == 401
            with memory.lease() as lease:
                lease.reserve((1 << 20) - 64)
                with pytest.raises(Overloaded, match="--queue-memory"):
                    await engine.answer(ForwardedRequest("GET", "/v2", {}, b""))
            served.check()
        finally:
            assert await served.stop()
        with pytest.raises(EngineUnavailable, match="its connection is lost"):
            await engine.answer(plain)


@pytest.mark.scale
def test_an_engine_that_the_autoscaler_adds_takes_models_over_and_gives_them_back(
    models: Models, tmp_path: Path
) -> None:
    """The load of several clients starts a second engine, and a single client's lets Ray stop it."""
    port = free_port()
    (tmp_path / "scale.json").write_text(json.dumps(autoscaled(models.folder, port)))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(tmp_path / "scale.json")]
    with started(command, "Started a local Ray instance") as (_, popen):
        own = Scaled(f"127.0.0.1:{port}", popen, models.expected)

        def engines_with(model: str) -> int:
            with triton.InferenceServerClient(own.address, network_timeout=START_S) as client:
                return len(client.get_inference_statistics(model)["model_stats"])

        eventually(lambda: _is_ready(own.address), START_S)
        assert [engines_with(model) for model in MODELS] == [1, 1, 1, 1]
        with ThreadPoolExecutor(8) as clients:
            busy = True

            def ask_on(number: int) -> bool:
                right = True
                while busy and right:
                    right = all(own.answers(model, number % 3) for model in MODELS)
                return right

            asked = [clients.submit(ask_on, number) for number in range(8)]
            try:
                eventually(lambda: len(own.engines()) == 2 and engines_with("a") == 2, START_S)
            finally:
                busy = False
            assert all(each.result(START_S) for each in asked)
        while len(own.engines()) == 2:
            assert all(own.answers(model, 0) for model in MODELS)
        assert all(own.answers(model, number) for model, number in own.expected)


def autoscaled(folder: Path, port: int) -> dict[str, object]:
    """A config file of Ray Serve."""
    values = {"repository": str(folder / "models"), "memory": MEMORY, "cache": str(folder / "cache")}
    values |= {"rates": str(folder / "rates"), "copies": "2", "batch_sizes": "1", "threads": "1", "replicas": "1"}
    autoscaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "look_back_period_s": 2}
    autoscaling |= {"upscale_delay_s": 1, "downscale_delay_s": 5}
    policy = {"policy_function": "cohabit.server.scale.app:requests_per_engine"}
    engine = {"name": "Engine", "autoscaling_config": {**autoscaling, "policy": policy}}
    application = {"name": "cohabit", "import_path": "cohabit.server.scale.app:app", "args": values}
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{**application, "deployments": [engine]}],
    }


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
def test_bodies_together_take_no_more_than_the_request_memory(scaled: Scaled) -> None:
    connection = http.client.HTTPConnection(scaled.address, timeout=START_S)
    for nbytes, status, reason in (
        (6 << 20, 503, "start the server with a larger --queue-memory"),
        (9 << 20, 413, "start the server with a larger --max-body"),
    ):
        connection.request("POST", "/v2/models/a/infer", bytes(nbytes))
        response = connection.getresponse()
        assert (response.status, reason in json.loads(response.read())["error"]) == (status, True)
        assert (response.headers["Retry-After"] == "1") is (status == 503)
    connection.close()


@pytest.mark.scale
def test_every_request_is_answered_while_an_engine_is_killed(scaled: Scaled) -> None:
    killed = scaled.engines()[0]
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(scaled.answers, model, number % 3) for number in range(20) for model in MODELS]
        while not any(each.done() for each in asked):
            time.sleep(0.01)
        killed.kill()
        assert all(each.result(START_S) for each in asked)
    eventually(lambda: killed.pid not in {e.pid for e in scaled.engines()} and len(scaled.engines()) == 2, START_S)
    assert all(scaled.answers(model, number) for model, number in scaled.expected)


@pytest.mark.scale
def test_engines_that_cannot_load_their_models_end_the_start_with_the_reason(tmp_path: Path) -> None:
    Stacks(tmp_path).put(tmp_path / "models", "a", 0)
    command = [sys.executable, "-m", "cohabit.server.cli", "scale", str(tmp_path / "models"), "--memory", "64KiB"]
    command += ["--replicas", "1", "--cache", str(tmp_path / "cache"), "--http-port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 1
    assert "Engine: " in ended.stderr
    assert "the budget is 64.0 KiB" in ended.stderr

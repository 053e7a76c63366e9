"""The server as a process: what it prints, what a client sees while it loads, and how it ends."""

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from server_fakes import config, identity, serving
from server_http import ask, infer, x

from server import cli
from server.cli import main

PROGRAM = Path(__file__).with_name("drain_program.py")
ROOT = Path(__file__).parents[2]


class Address:
    """What the request helpers need of a server."""

    def __init__(self, stdout: IO[str]) -> None:
        http, metrics = stdout.readline().strip(), stdout.readline().strip()
        assert http.startswith("http: http://127.0.0.1:")
        assert metrics.startswith("metrics: http://127.0.0.1:")
        assert metrics.endswith("/metrics")
        self.port = int(http.rpartition(":")[2])


@contextmanager
def process(
    repository: Path, loading_steps: int = 0, *token_files: Path
) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    (repository / "sleepy" / "1").mkdir(parents=True)
    (repository / "sleepy" / "1" / "model.pt2").touch()
    command = [sys.executable, "-W", "error", str(PROGRAM), str(repository), str(loading_steps)]
    command += map(str, token_files)
    environment = {"PYTHONPATH": f"{ROOT}:{PROGRAM.parent}", "PATH": "/usr/bin"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            assert started.stdout is not None
            yield started, Address(started.stdout)
        finally:
            started.kill()


def until_ready(address: Address) -> None:
    deadline = time.monotonic() + 20
    while ask(address, "GET", "/v2/health/ready").status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sigterm_answers_what_is_in_flight_and_exits_with_0(tmp_path: Path) -> None:
    with process(tmp_path) as (server, address), ThreadPoolExecutor(2) as clients:
        until_ready(address)
        body = {"inputs": [x([0.6, 0, 0, 0])]}
        in_flight = clients.submit(infer, address, "sleepy", body)
        time.sleep(0.2)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = infer(address, "sleepy", body)
        assert refused.status == 503
        assert "stopping" in refused.error
        assert in_flight.result().status == 200
        assert server.wait(10) == 0


def test_sigint_ends_an_idle_server_at_once(tmp_path: Path) -> None:
    with process(tmp_path) as (server, address):
        until_ready(address)
        server.send_signal(signal.SIGINT)
        assert server.wait(5) == 0


def test_sighup_exchanges_the_tokens(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("the-old-token-0123456789")
    repository = tmp_path / "repository"
    with process(repository, 0, tokens) as (server, address):
        until_ready(address)

        def status(token: str) -> int:
            return ask(address, "GET", "/v2", headers={"Authorization": f"Bearer {token}"}).status

        assert status("the-old-token-0123456789") == 200
        tokens.write_text("the-new-token-0123456789")
        server.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 4  # sooner than the files are looked at
        while status("the-new-token-0123456789") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert status("the-old-token-0123456789") == 401
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_server_listens_while_it_loads(tmp_path: Path) -> None:
    with process(tmp_path, loading_steps=10_000) as (server, address):
        assert ask(address, "GET", "/v2/health/live").status == 200
        assert ask(address, "GET", "/v2/health/ready").status == 400
        assert ask(address, "GET", "/v2/models/sleepy/ready").status == 400
        (entry,) = ask(address, "POST", "/v2/repository/index").json
        assert entry["state"] == "LOADING"
        early = infer(address, "sleepy", {"inputs": [x()]})
        assert early.status == 503
        assert "model 'sleepy' is not ready: it is still loading" in early.error
        server.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "--memory: 'lots' is not a size"),
        (["--memory", "0"], "--memory: '0' is out of range"),
        (["--memory", "0%"], "--memory: '0%' is out of range"),
        (
            ["--memory", "1GiB", "--http-port", "70000"],
            "--http-port: '70000' is not a whole number from 0 to 65535",
        ),
        (["--memory", "1GiB", "--batch-sizes", "1,0"], "--batch-sizes: '0'"),
        (["--memory", "1GiB", "--model-rate", "resnet"], "--model-rate: 'resnet' is not of the form NAME=RATE"),
        (["--memory", "1GiB", "--model-rate", "a=-1"], "--model-rate: '-1' is not a rate"),
        (["--memory", "1GiB", "--link-bandwidth", "fast"], "--link-bandwidth: 'fast'"),
        (["--memory", "1GiB", "--scripted", "--device", "cuda"], "--scripted is for the CPU"),
        (["--memory", "1GiB", "--threads", "0"], "--threads: '0'"),
        (["--memory", "1GiB", "--exit-timeout-secs", "nan"], "--exit-timeout-secs: 'nan'"),
        (["--memory", "1GiB", "--max-body", "-1"], "--max-body"),
        (["--memory", "1GiB", "--queue-limit", "0"], "--queue-limit: '0'"),
        (["--memory", "1GiB"], "model repository nowhere does not exist"),
    ],
)
def test_impossible_values_stop_the_start(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        status = main(["serve", "nowhere", *arguments])
    except SystemExit as stop:  # argparse itself
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in ((["--version"], "cohabit "), (["serve", "--help"], "25%")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_what_is_there_after_loading_is_never_looked_at_by_the_garbage_collector_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = serving(identity("one", "FP32"))
    monkeypatch.setattr("server.placement.loader.load", lambda *_: loaded)
    try:
        assert cli._load([], config(), lambda *_: None) is loaded
        assert gc.get_freeze_count() > len(gc.get_objects())
    finally:
        gc.unfreeze()

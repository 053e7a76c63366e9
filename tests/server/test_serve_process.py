"""The command as a process: what it prints, what clients see while it loads, and how it ends."""

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from cohabit.server.cli import EXIT_FAILED, main
from cohabit.server.commands.serve import serve_until_stopped
from cohabit.server.serve import Server
from tests.support.server.server_fakes import config, eventually, identity, running, serving
from tests.support.server.server_http import ask, infer, x

pytestmark = pytest.mark.process

PROGRAM = "tests.support.server.drain_program"
ROOT = Path(__file__).parents[2]


PORTS = ("--http-port", "0", "--grpc-port", "off", "--metrics-port", "0")


@dataclass
class Process:
    """`drain_program`, whose model `gated` waits for the file `go`."""

    popen: subprocess.Popen[str]
    folder: Path
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        return ask(self, "GET", "/v2/health/ready").status == 200

    def ends_with(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit status."""
        self.popen.send_signal(number)
        return self.popen.wait(60)


@contextmanager
def process(folder: Path, waits: str, *token_files: Path) -> Iterator[Process]:
    version = folder / "models" / "gated" / "1"
    version.mkdir(parents=True)
    (version / "model.pt2").touch()
    command = [sys.executable, "-W", "error", "-m", PROGRAM, str(folder / "models"), str(folder), waits]
    command += map(str, token_files)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as popen:
        try:
            assert popen.stdout is not None
            http, metrics, grpc = (popen.stdout.readline().strip() for _ in range(3))
            assert http.startswith("http: http://127.0.0.1:")
            assert metrics.startswith("metrics: http://127.0.0.1:")
            assert metrics.endswith("/metrics")
            assert grpc.startswith("grpc: 127.0.0.1:")
            yield Process(popen, folder, int(http.rpartition(":")[2]))
        finally:
            popen.kill()


def test_sigterm_answers_what_is_in_flight_and_exits_with_0(tmp_path: Path) -> None:
    with process(tmp_path, "model") as server, ThreadPoolExecutor(2) as clients:
        eventually(server.is_ready)
        body = {"inputs": [x()]}
        in_flight = clients.submit(infer, server, "gated", body)
        eventually((tmp_path / "executing").exists)
        server.popen.send_signal(signal.SIGTERM)
        eventually(lambda: not server.is_ready())
        refused = infer(server, "gated", body)
        assert refused.status == 503
        assert "stopping" in refused.error
        (tmp_path / "go").touch()
        assert in_flight.result().status == 200
        assert server.popen.wait(60) == 0


def test_sighup_exchanges_the_tokens_and_sigint_ends_the_server(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("the-old-token-0123456789")
    with process(tmp_path, "nothing", tokens) as server:
        eventually(server.is_ready)

        def status(token: str) -> int:
            return ask(server, "GET", "/v2", headers={"Authorization": f"Bearer {token}"}).status

        assert status("the-old-token-0123456789") == 200
        tokens.write_text("the-new-token-0123456789")
        server.popen.send_signal(signal.SIGHUP)
        eventually(lambda: status("the-new-token-0123456789") == 200)
        assert status("the-old-token-0123456789") == 401
        assert server.ends_with(signal.SIGINT) == 0


def test_sighup_without_token_files_answers_what_is_in_flight_and_ends_the_server(tmp_path: Path) -> None:
    with process(tmp_path, "model") as server, ThreadPoolExecutor(1) as clients:
        eventually(server.is_ready)
        in_flight = clients.submit(infer, server, "gated", {"inputs": [x()]})
        eventually((tmp_path / "executing").exists)
        server.popen.send_signal(signal.SIGHUP)
        eventually(lambda: not server.is_ready())
        (tmp_path / "go").touch()
        assert in_flight.result().status == 200
        assert server.popen.wait(60) == 0


def test_the_server_listens_while_it_loads_and_can_be_stopped_then(tmp_path: Path) -> None:
    with process(tmp_path, "loading") as server:
        assert ask(server, "GET", "/v2/health/live").status == 200
        assert ask(server, "GET", "/v2/health/ready").status == 400
        assert infer(server, "gated", {"inputs": [x()]}).status == 503, "whether the repository was read or not"
        eventually(lambda: ask(server, "POST", "/v2/repository/index").json != [])
        (entry,) = ask(server, "POST", "/v2/repository/index").json
        assert entry["state"] == "LOADING"
        assert ask(server, "GET", "/v2/models/gated/ready").status == 400
        early = infer(server, "gated", {"inputs": [x()]})
        assert early.status == 503
        assert "model 'gated' is not ready: it is still loading" in early.error
        assert server.ends_with(signal.SIGTERM) == 0


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
        (["--memory", "1GiB", "--rates", "resnet"], "--rates: 'resnet' is neither NAME=RATE nor a file"),
        (["--memory", "1GiB", "--rates", "a=-1"], "--rates: '-1' is not a rate"),
        (["--memory", "1GiB", "--link-bandwidth", "fast"], "--link-bandwidth: 'fast'"),
        (["--memory", "1GiB", "--threads", "0"], "--threads: '0'"),
        (["--memory", "1GiB", "--exit-timeout-secs", "nan"], "--exit-timeout-secs: 'nan'"),
        (["--memory", "1GiB", "--max-body", "-1"], "--max-body"),
        (["--memory", "1GiB", "--max-connections", "0"], "--max-connections: '0'"),
        (["--memory", "1GiB", "--engine", "in-process", *PORTS], "model repository nowhere does not exist"),
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


async def test_a_server_whose_engine_is_no_longer_supervised_ends_with_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def loaded(self: Server, on_progress: object) -> str:
        return ""

    async def at_once(self: Server) -> None:
        return

    monkeypatch.setattr(Server, "load", loaded)
    monkeypatch.setattr(Server, "failed", at_once)
    assert await serve_until_stopped(config(), Console(stderr=True)) == EXIT_FAILED


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in ((["--version"], "cohabit "), (["serve", "--help"], "25%")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_the_garbage_collector_never_visits_what_exists_after_loading() -> None:
    loaded = serving(identity("one", "FP32"))
    gc.unfreeze()
    with running(loaded):
        assert gc.get_freeze_count() > len(gc.get_objects())

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cohabit.loadgen.cli import main
from tests.support.server import fake_kserve

pytestmark = pytest.mark.process

FAKE = f"{Path(sys.executable).name} {fake_kserve.__file__}"
QUICK = ("--duration", "0.3", "--warmup", "0", "--rate", "100")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models as far as loadgen looks at them."""
    for name in ("a", "b"):
        folder = tmp_path / "repository" / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.pt2").touch()
    return tmp_path / "repository"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "'0' is not above 0"),
        (["--models", "none"], "'none' is not a whole number above 0"),
        (["--timeout", "inf"], "'inf' is not a number"),
        (["--model", "a,a"], "a is there twice"),
        (["--model", "a", "--model", "b,a"], "a is there twice"),
        (["--url", "h:1", "--models", "3", "--model", "a", "--model", "b"], "--models 3, but --model names 2"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--url", "h:1", "--memory", "1GiB"], "leave out --url"),
        (["--url", "ftp://h:1"], "its scheme is none of http, https, grpc, grpcs"),
        (["--url", "h:1", "--models", "3", "--model", "a,b"], "--models 3, but --model names 2"),
        (["--url", "h:1", "--json", "/no/such/folder/report.json"], "there is no folder /no/such/folder"),
        (["--repository", "/no/such/repository"], "no NAME/VERSION/model.pt2 in it"),
        (["--url", "h:1", "--find-rate"], "give --slo-ms"),
        (
            ["--url", "h:1", "--trace", "t.csv", "--concurrency", "2"],
            "leave out --model, --zipf, --bursts and --conc",
        ),
        (["--url", "h:1", "--inputs", "/no/such"], "there is no such file or folder"),
        (["--slo-percentile", "101"], "'101' is above 100"),
        (["--bursts", "1"], "is not two spans"),
        (["report", "/no/such.json"], "is not a report of this version"),
        (["prepare"], "give the folder to write, or --list"),
        (["prepare", "/tmp/x", "--zoo", "alexnet"], "no model alexnet; there are bert_base"),
    ],
)
def test_an_impossible_command_line_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_no_server_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "127.0.0.1:9", *QUICK]) == 1
    assert "no server answers at 127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["prepare", "--help"]])
def test_help_exits_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "--help" in capsys.readouterr().out


@pytest.mark.usefixtures("any_lag")
def test_a_run_without_url_starts_a_server_and_stops_it(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--repository", str(repository), "--server", FAKE, "--json", str(tmp_path / "r.json")]
    assert main([*arguments, "--memory", "1MiB", "--layout", "lru", *QUICK, "--slo-ms", "60000"]) == 0
    served = (tmp_path / "stopped").read_text()
    ports = "--http-port 0 --grpc-port off --metrics-port 0"
    assert served == f"serve {repository} --memory 1MiB --layout lru {ports} --no-quick-start"
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["completed"] == report["sent"] > 0
    assert [m["model"] for m in report["models"]] == ["a", "b"]
    assert "p99.9" in capsys.readouterr().out


@pytest.fixture
def any_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may send late; these tests are about something else."""
    monkeypatch.setattr("cohabit.loadgen.report.LATE_GENERATOR_S", 60.0)


@pytest.mark.usefixtures("any_lag")
def test_a_missed_slo_exits_with_1(repository: Path) -> None:
    arguments = ["--repository", str(repository), "--server", FAKE, "--memory", "1MiB"]
    assert main([*arguments, *QUICK, "--slo-ms", "0.001"]) == 1


def test_a_run_whose_requests_were_late_is_invalid_and_exits_with_3(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cohabit.loadgen.report.LATE_GENERATOR_S", 0.0)
    monkeypatch.setattr("cohabit.loadgen.report.LATE_GENERATOR_SHARE", 0.0)
    assert main(["--repository", str(repository), "--server", FAKE, "--memory", "1MiB", *QUICK]) == 3
    assert "invalid: the generator could not keep its schedule" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("any_lag")
def test_layouts_are_compared_on_one_page(repository: Path, tmp_path: Path) -> None:
    arguments = ["--repository", str(repository), "--server", FAKE, "--memory", "1MiB"]
    runs = ["--layouts", "lru,resident", "--sweep", "50,100", "--duration", "0.1", "--warmup", "0"]
    assert main(["compare", *arguments, *runs, "--output", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lru.json", "resident.json", "compare.html"}
    assert "--memory 100% --layout resident" in (tmp_path / "stopped").read_text()


def test_a_server_that_does_not_start_is_reported_with_its_log(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "1")
    assert main(["--repository", str(repository), "--server", FAKE, "--memory", "1MiB", *QUICK]) == 1
    message = capsys.readouterr().err
    assert "exited with status 1 before it was ready" in message
    assert "InfeasibleBudget: 1.0 MiB is not enough" in message


def test_a_server_that_is_not_installed_is_reported(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repository", str(repository), "--server", "no-such-server", *QUICK]) == 1
    assert "'no-such-server' is not installed" in capsys.readouterr().err


HEARING_SIGINT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from cohabit.loadgen.cli import main
from tests.support.server import fake_kserve
sys.exit(main())
"""
"""Shells start background commands with SIGINT ignored."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_its_server(repository: Path, tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["--repository", str(repository), "--server", FAKE, "--duration", "600"]
    command = [sys.executable, "-c", HEARING_SIGINT, *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        try:
            assert run.stderr is not None
            assert b"with --memory 25%" in run.stderr.readline()
            while not (tmp_path / "started").exists() and run.poll() is None:
                time.sleep(0.01)
            run.send_signal(number)
            assert run.wait(60) == 130
            assert b"interrupted" in run.stderr.read()
        finally:
            run.kill()
    assert (tmp_path / "stopped").exists()


def test_help_imports_neither_torch_nor_a_client() -> None:
    program = (
        "import sys, loadgen.cli; loadgen.cli.main(['--help']);"
        "sys.exit(bool({'torch', 'tritonclient', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, env=environment).returncode == 0
    )

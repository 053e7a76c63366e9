"""Commands against a running server: what they print for people and for scripts, and how they fail."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cohabit.planner.shapes import Bucket
from cohabit.server.cli import main
from cohabit.server.commands.remote import tables
from cohabit.server.ipc.model import ModelFootprint, ModelKey
from tests.support.server.server_fakes import FakeLoaded, Running, adder, identity, running, serving
from tests.support.server.server_http import infer, x

pytestmark = pytest.mark.process

TOKEN, CONTROL = "infer-token-0123456789", "control-token-0123456789"


class Orders:
    """Takes orders to load and unload, and remembers them."""

    mode = "explicit"

    def __init__(self, own: Running) -> None:
        self.given: list[tuple[str, str]] = []
        self.catalog = own.server.client.catalog

    async def load(self, model: str, config: str | None = None) -> None:
        self.given.append(("load", model))

    async def unload(self, model: str, dependents: bool = False) -> None:
        self.given.append(("unload", model))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    loaded: FakeLoaded = serving(adder(), identity("id", "FP32"))
    loaded.failures = {ModelKey("damaged", 1): "model.pt2 is [truncated]"}
    loaded.footprints = {
        ModelKey("adder", 3): ModelFootprint(
            3 << 20,
            400,
            100,
            {Bucket(1): 0.5},
            {Bucket(1): 0.4},
            0,
            {Bucket(1): 2 << 20, Bucket(8): 9 << 20},
            {Bucket(1): ("best (genetic)", 238)},
            0.35,
        )
    }
    with running(loaded, strict_readiness=False) as handle:
        assert infer(handle, "id", {"inputs": [x()]}).status == 200
        yield handle


def run(server: Running, *arguments: str) -> int:
    return main([arguments[0], "--url", server.address, *arguments[1:]])


def test_models_are_listed_with_their_memory_and_reasons(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "models") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert all(
        part in lines["adder"] for part in ("3", "READY", "3.0 MiB", "25.0%", "best (genetic), 238 candidates")
    )
    assert "measured beside other work: adder; they are measured again" in " ".join(lines["times"].split())
    assert all(part in lines["damaged"] for part in ("UNAVAILABLE", "model.pt2 is [truncated]"))
    assert " ".join(lines["of"].split()) == (
        "of a workspace, 9.0 MiB for activations of adder at batch 8; 2.0 MiB with --batch-sizes 1 (for one model:"
        " max_batch_size of its config.pbtxt)"
    )


def test_models_as_json_are_the_repository_index(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "models", "--json") == 0
    index = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["state"] for entry in index}["damaged"] == "UNAVAILABLE"


def test_the_http_port_is_all_that_a_command_needs_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    with running(serving(adder()), metrics_port=None) as alone:
        assert run(alone, "models") == 0
        assert "adder" in capsys.readouterr().out


def test_statistics_of_one_model_and_of_all(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "stats") == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["id"][1:6] == ["1", "1", "0", "1", "1.00"]
    assert "adder" in lines
    assert run(own, "stats", "id", "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["inference_stats"]["success"]["count"] == 1


@pytest.mark.parametrize("command", ["models", "stats"])
def test_tables_are_refreshed_until_an_interrupt(
    own: Running, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter((None, None, KeyboardInterrupt))

    def tick(seconds: float) -> None:
        if (error := next(ticks)) is not None:
            raise error

    monkeypatch.setattr("cohabit.server.commands.remote.tables.time", SimpleNamespace(sleep=tick))
    assert run(own, command, "--watch") == 130
    assert next(ticks, "none") == "none", "shown three times"
    assert "adder" in capsys.readouterr().out


def test_statistics_of_an_unknown_model_are_refused(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "stats", "no/such") == 1
    assert "requested model 'no/such' is not available" in capsys.readouterr().err


def test_load_and_unload_give_orders_in_turn(
    own: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own.server.plane, "_client", orders := Orders(own))
    assert run(own, "load", "a", "b c") == 0
    assert run(own, "unload", "adder", "--json") == 0
    assert orders.given == [("load", "a"), ("load", "b c"), ("unload", "adder")]
    assert capsys.readouterr().out.splitlines() == ["loaded a", "loaded b c", '{"unloaded":"adder"}']


def test_to_unload_a_model_that_there_is_not_is_an_error(
    own: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own.server.plane, "_client", orders := Orders(own))
    assert run(own, "unload", "adder", "nope") == 1
    said = capsys.readouterr()
    assert "has no model 'nope'; its models are adder, damaged, id" in said.err
    assert (said.out, orders.given) == ("", []), "nothing was unloaded"
    assert run(own, "unload", "ader") == 1
    assert "; did you mean 'adder'?" in capsys.readouterr().err


def test_a_refused_order_says_why(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "load", "adder") == 1
    assert "start the server with --model-control-mode explicit" in capsys.readouterr().err


def test_tokens_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infer_tokens, control_tokens = tmp_path / "infer", tmp_path / "control"
    infer_tokens.write_text(f"# a comment\n{TOKEN}\n")
    control_tokens.write_text(CONTROL)
    with running(serving(adder()), token_files=(infer_tokens,), control_token_files=(control_tokens,)) as guarded:
        assert run(guarded, "models") == 1
        assert "answered 401: this call needs a token" in capsys.readouterr().err
        assert run(guarded, "models", "--token-file", str(infer_tokens)) == 0
        assert run(guarded, "load", "adder", "--token-file", str(infer_tokens)) == 1
        assert "answered 403" in capsys.readouterr().err


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1 that has signed itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subject = ("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        *subject,
    ]
    subprocess.run(
        [*command, "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
    )
    return folder


def test_commands_speak_tls_and_say_where_one_side_does_not(
    certificate: Path, own: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"tls_cert": certificate / "cert.pem", "tls_key": certificate / "key.pem"}
    with running(serving(adder()), **files) as secure:
        host = secure.address.rpartition("/")[2]
        assert main(["models", "--url", f"https://{host}", "--ca", str(certificate / "cert.pem")]) == 0
        capsys.readouterr()
        assert main(["models", "--url", f"https://{host}"]) == 1
        assert "name the authority that has signed it with --ca FILE" in capsys.readouterr().err
        assert main(["models", "--url", f"http://{host}"]) == 1
        assert f"it speaks TLS: give https://{host}" in capsys.readouterr().err
    plain = own.address.rpartition("/")[2]
    assert main(["models", "--url", f"https://{plain}"]) == 1
    assert "if the server has no TLS, give http://" in capsys.readouterr().err
    assert main(["models", "--url", f"https://{plain}", "--ca", "/nowhere"]) == 2
    assert "--ca: /nowhere cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("models", "--url", "127.0.0.1:1"), 1, "http://127.0.0.1:1/v2/repository/index does not answer"),
        (
            ("models", "--url", "file:///etc/passwd"),
            2,
            "--url: 'file:///etc/passwd' is not an http or https address",
        ),
        (("models", "--url", "http://:99999"), 2, "--url: 'http://:99999' is not an http"),
        (("stats", "--token-file", "/nowhere"), 2, "--token-file: /nowhere cannot be read"),
    ],
)
def test_what_cannot_be_asked_is_an_error_with_the_reason(
    arguments: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert message in capsys.readouterr().err


def test_another_kind_of_server_is_no_traceback(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = own.server.metrics_url.removesuffix("/metrics")
    assert main(["stats", "--url", metrics]) == 1
    assert "answered 404" in capsys.readouterr().err


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    entries: list[dict[str, Any]] = [{"name": "[red]m[/red]", "state": "READY"}]
    Console(width=120).print(tables.models(entries, {}))
    assert "[red]m[/red]" in capsys.readouterr().out

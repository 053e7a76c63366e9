"""Commands against a running server: what they print for people and for scripts, and how they fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from server_fakes import FakeLoaded, Running, adder, identity, running, serving
from server_http import infer, x

from cohabit.planner.shapes import Bucket
from cohabit.server.cli import main
from cohabit.server.commands.remote import tables
from cohabit.server.commands.remote.samples import Samples, parse
from cohabit.server.commands.remote.top import snapshot
from cohabit.server.ipc.model import ModelFootprint, ModelKey
from cohabit.server.ipc.statistics import SECONDS, Histogram
from cohabit.server.observe.prometheus import Family, written

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
        ModelKey("adder", 3): ModelFootprint(3 << 20, 400, 100, {Bucket(1): 0.5}, {Bucket(1): 0.4})
    }
    with running(loaded, strict_readiness=False) as handle:
        assert infer(handle, "id", {"inputs": [x()]}).status == 200
        yield handle


def run(server: Running, *arguments: str) -> int:
    return main([arguments[0], "--url", server.address, *arguments[1:]])


def test_models_are_listed_with_their_memory_and_reasons(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "models") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert all(part in lines["adder"] for part in ("3", "READY", "3.0 MiB", "25.0%"))
    assert all(part in lines["damaged"] for part in ("UNAVAILABLE", "model.pt2 is [truncated]"))


def test_models_as_json_are_the_repository_index(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "models", "--json") == 0
    index = json.loads(capsys.readouterr().out)
    assert {entry["name"]: entry["state"] for entry in index}["damaged"] == "UNAVAILABLE"


@pytest.mark.parametrize("command", ["models", "top"])
def test_the_http_port_is_all_that_a_command_needs_to_know(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(serving(adder()), metrics_port=None) as alone:
        assert run(alone, command, *["--interval", "0.01"] * (command == "top")) == 0
        assert "adder" in capsys.readouterr().out


def test_statistics_of_one_model_and_of_all(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "stats") == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["id"][1:6] == ["1", "1", "0", "1", "1.00"]
    assert "adder" in lines
    assert run(own, "stats", "id", "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["inference_stats"]["success"]["count"] == 1


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


def test_a_refused_order_says_why(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "load", "adder") == 1
    assert "start the server with --model-control explicit" in capsys.readouterr().err


def test_top_prints_one_snapshot_where_nobody_watches(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "top", "--interval", "0.1") == 0
    printed = capsys.readouterr().out
    assert "workspace 100 B" in printed
    assert "damaged (not ready)" in printed
    assert "25.0%" in printed


def test_top_as_json_has_the_same_numbers(own: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own, "top", "--interval", "0.1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in shown["models"]}
    assert rows["adder"]["partition_bytes"] == 3 << 20
    assert rows["adder"]["plan_gap"] == pytest.approx(0.25)
    assert rows["damaged"]["ready"] is False
    assert shown["memory_bytes"] == {"workspace": 100, "partitions": 700, "free": 224}


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
        assert run(guarded, "top", "--interval", "0.1", "--token-file", str(control_tokens)) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("models", "--url", "127.0.0.1:1"), 1, "http://127.0.0.1:1/v2/repository/index does not answer"),
        (("models", "--url", "file:///etc/passwd"), 2, "--url: 'file:///etc/passwd' is no http or https address"),
        (("top", "--url", "http://:99999"), 2, "--url: 'http://:99999' is no http"),
        (("top", "--interval", "0"), 2, "--interval: '0' is not a number of seconds over zero"),
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


def reading(**counters: float) -> Samples:
    labels = {"model": "m", "version": "2"}
    families = [
        Family(name, "gauge" if name.endswith("_sum") else "counter", "", [(labels, value)])
        for name, value in counters.items()
    ]
    return parse(written([Family("cohabit_model_ready", "gauge", "", [(labels, 1.0)]), *families]).decode())


def test_rates_are_growth_over_time() -> None:
    before = reading(nv_inference_request_success=10, nv_inference_exec_count=5, nv_inference_count=10)
    now = reading(nv_inference_request_success=40, nv_inference_exec_count=15, nv_inference_count=40)
    (row,) = snapshot(before, now, 2.0)["models"]
    wanted = {"name": "m", "version": "2", "answered_per_s": 15.0, "rows_per_execution": 3.0}
    assert row | wanted | {"queue_p50_s": None, "stall_share": None} == row


def test_a_counter_that_began_anew_is_counted_from_zero() -> None:
    before, now = reading(nv_inference_request_success=1000), reading(nv_inference_request_success=4)
    assert snapshot(before, now, 2.0)["answered_per_s"] == 2.0


def test_stall_share_is_of_the_computing_time() -> None:
    before = reading(cohabit_stall_seconds_total=1, cohabit_compute_seconds_sum=10)
    now = reading(cohabit_stall_seconds_total=2, cohabit_compute_seconds_sum=14)
    assert snapshot(before, now, 1.0)["models"][0]["stall_share"] == 0.25


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_quantiles_are_within_a_bucket_of_numpys(share: float) -> None:
    durations = 10 ** np.random.default_rng(3).uniform(-3.5, 0.5, 2000)
    histogram = Histogram.of(SECONDS)
    for seconds in durations:
        histogram.add(float(seconds))
    samples = parse(written([Family("h", "histogram", "", [({}, histogram)])]).decode())
    estimate, exact = samples.quantile("h", share), float(np.quantile(durations, share))
    assert estimate is not None
    assert exact / 1.8 < estimate < exact * 1.8


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    entries: list[dict[str, Any]] = [{"name": "[red]m[/red]", "state": "READY"}]
    Console(width=120).print(tables.models(entries, Samples({})))
    assert "[red]m[/red]" in capsys.readouterr().out

"""Loading, unloading, and settings of traces and logs, by tritonclient over both protocols."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from cohabit.server.errors import LoadFailed, Refused
from tests.support.server.clients import Client
from tests.support.server.server_fakes import Running, identity, running, serving
from tests.support.server.server_http import ask

pytestmark = pytest.mark.process


class Orders:
    """Stands for the engine's loading and unloading: notes the orders, and knows one model."""

    def __init__(self) -> None:
        self.given: list[tuple[str | None, ...]] = []

    async def load(self, model: str, config: str | None) -> None:
        if model == "damaged":
            raise LoadFailed(model, "model.pt2 is truncated")
        if model != "one":
            raise Refused("NotInRepository", f"failed to load '{model}', failed to poll from model repository")
        self.given.append(("load", model, config))

    async def unload(self, model: str) -> None:
        self.given.append(("unload", model))


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    """A server whose settings these tests change."""
    with running(serving(identity("one", "FP32"), identity("two", "FP32"))) as handle:
        yield handle


@pytest.fixture
def orders(own: Running, monkeypatch: pytest.MonkeyPatch) -> Orders:
    orders = Orders()
    monkeypatch.setattr(own.engine.lifecycle, "load", orders.load)
    monkeypatch.setattr(own.engine.lifecycle, "unload", orders.unload)
    return orders


def test_load_and_unload(client: Client, orders: Orders) -> None:
    client.raw.load_model("one")
    client.raw.load_model("one", config='{"max_batch_size": 4}')
    client.raw.unload_model("one")
    client.raw.unload_model("one", unload_dependents=True)
    assert orders.given == [
        ("load", "one", None),
        ("load", "one", '{"max_batch_size": 4}'),
        ("unload", "one"),
        ("unload", "one"),
    ]


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize(
    ("model", "http", "grpc", "message"),
    [
        ("nope", "500", "INTERNAL", "failed to load 'nope', failed to poll from model repository"),
        ("damaged", "400", "INVALID_ARGUMENT", "load failed for model 'damaged': model.pt2 is truncated"),
    ],
)
def test_failed_loads(client: Client, model: str, http: str, grpc: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.raw.load_model(model)
    assert client.status(caught.value) == {"http": http, "grpc": grpc}[client.protocol]


def test_without_model_control_no_order_is_taken(client: Client) -> None:
    for order in (client.raw.load_model, client.raw.unload_model):
        with pytest.raises(InferenceServerException, match="not allowed") as caught:
            order("one")
        assert client.status(caught.value) in ("503", "UNAVAILABLE")


def test_files_are_not_taken_from_requests(client: Client, orders: Orders) -> None:
    with pytest.raises(InferenceServerException, match="load requests cannot contain model files") as caught:
        client.raw.load_model("one", config="{}", files={"file:1/model.pt2": b"abc"})
    assert client.status(caught.value) in ("501", "UNIMPLEMENTED")
    assert orders.given == []


def test_malformed_orders_are_refused(own: Running, orders: Orders) -> None:
    for body in (b"{", b"[]", b'{"parameters": 1}', b'{"parameters": {"config": 1}}', b"[" * 9999):
        assert ask(own, "POST", "/v2/repository/models/one/load", body).status == 400
    answer = ask(own, "POST", "/v2/repository/models/one/load", b'{"parameters": {"configuration": "x"}}')
    assert (answer.status, answer.error) == (400, "unrecognized parameter for load request: 'configuration'")
    answer = ask(own, "POST", "/v2/repository/models/one/unload", b'{"parameters": {"unload_dependents": "yes"}}')
    assert answer.status == 400
    for order in ("load", "unload"):
        assert ask(own, "POST", f"/v2/repository/main/models/one/{order}").status == 501, "there is one repository"
    assert orders.given == []


@pytest.mark.parametrize("model", [None, "one"])
def test_trace_settings_are_read(client: Client, model: str | None) -> None:
    assert _trace(client.raw.get_trace_settings(model)) == {
        "trace_file": "",
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_mode": "triton",
    }


@pytest.mark.parametrize("model", [None, "one"])
def test_trace_settings_are_not_changed_while_the_server_runs(client: Client, model: str | None) -> None:
    before = _trace(client.raw.get_trace_settings(model))
    with pytest.raises(InferenceServerException, match=r"trace_rate.*start it with --trace-config") as caught:
        client.raw.update_trace_settings(model, {"trace_rate": "5"})
    assert client.status(caught.value) in ("501", "UNIMPLEMENTED")
    assert _trace(client.raw.update_trace_settings(model, {})) == before, "a change of nothing reads them"


def _trace(settings: Any) -> dict[str, Any]:
    if isinstance(settings, dict):
        return settings
    values = {key: list(setting.value) for key, setting in settings.settings.items()}
    return {key: value if key == "trace_level" else value[0] for key, value in values.items()}


def test_trace_settings_of_unknown_models(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="'nope' is not found") as caught:
        client.raw.get_trace_settings("nope")
    assert client.status(caught.value) in ("400", "INVALID_ARGUMENT")


def test_log_settings_act_on_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("cohabit.test")
    root = logging.getLogger()
    try:
        assert _log(client.raw.get_log_settings())["log_info"] is True
        client.raw.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"})
        log.debug("details")
        log.info("news")
        log.warning("trouble")
        assert [r.message for r in caplog.records if r.name == "cohabit.test"] == ["details", "trouble"]
        settings = _log(client.raw.get_log_settings())
        assert (settings["log_info"], settings["log_verbose_level"], settings["log_format"]) == (
            False,
            1,
            "ISO8601",
        )
    finally:
        client.raw.update_log_settings({"log_info": True, "log_verbose_level": 0, "log_format": "default"})
        for handler in root.handlers:
            handler.filters.clear()


def _log(settings: Any) -> dict[str, Any]:
    if isinstance(settings, dict):
        return settings
    return {k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in settings.settings.items()}


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"log_info": 3}, 400),
        ({"log_verbose_level": -1}, 400),
        ({"log_verbose_level": "x"}, 400),
        ({"log_format": "pretty"}, 400),
        ({"log_colour": "red"}, 400),
        ({"log_file": "/tmp/log"}, 501),
        ([], 400),
    ],
    ids=str,
)
def test_bad_log_settings(own: Running, settings: Any, status: int) -> None:
    answer = ask(own, "POST", "/v2/logging", json.dumps(settings).encode())
    assert answer.status == status
    assert answer.error

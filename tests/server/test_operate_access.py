"""Bearer tokens over HTTP and gRPC: who may call what, asked with the unchanged tritonclient."""

import http.client
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from cohabit.server.errors import ConfigError, Unauthenticated
from cohabit.server.frontend.access import OPEN, Permission, open_access
from cohabit.server.http.endpoints import endpoints
from cohabit.server.serve import Server
from tests.support.server.clients import PROTOCOLS, Client, connect
from tests.support.server.metrics_client import MetricsPort
from tests.support.server.server_fakes import Running, config, identity, refused, running, serving
from tests.support.server.server_http import ask

pytestmark = pytest.mark.process

INFER, CONTROL, WRONG = "infer-token-0123456789", "control-token-0123456789", "nobodys-token-0123456789"


def token_file(folder: Path, name: str, *lines: str) -> tuple[Path, ...]:
    path = folder / name
    path.write_text("\n".join(lines))
    return (path,)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tokens")
    with running(
        serving(identity("id", "FP32")),
        token_files=token_file(folder, "infer", "# who may infer", "", INFER, "another-token-0123456789"),
        control_token_files=token_file(folder, "control", CONTROL),
    ) as handle:
        yield handle


@pytest.fixture(params=PROTOCOLS)
def client(request: pytest.FixtureRequest, guarded: Running) -> Client:
    return connect(guarded, request.param)


def headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def infer(client: Client, token: str | None) -> np.ndarray[Any, Any]:
    tensor = client.input("x", np.ones((1, 4), np.float32), "FP32")
    result: np.ndarray[Any, Any] = client.raw.infer("id", [tensor], headers=headers(token)).as_numpy("y")
    return result


def refusal(call: Any, *arguments: Any, **keywords: Any) -> InferenceServerException:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **keywords)
    return caught.value


def test_every_token_of_either_file_permits_inference(client: Client) -> None:
    for token in (INFER, "another-token-0123456789", CONTROL):
        assert infer(client, token).tolist() == [[1, 1, 1, 1]]
    for wrong in (None, WRONG, INFER[:-1], f"{INFER}x"):
        error = refusal(infer, client, wrong)
        assert client.status(error) in ("401", "UNAUTHENTICATED")
        assert (wrong or "none") not in error.message()


def test_reading_needs_a_token_and_changing_one_for_control(client: Client) -> None:
    assert client.status(refusal(client.raw.get_model_metadata, "id")) in ("401", "UNAUTHENTICATED")
    assert client.raw.get_model_metadata("id", headers=headers(INFER))
    for call in (client.raw.load_model, client.raw.unload_model):
        error = refusal(call, "id", headers=headers(INFER))
        assert client.status(error) in ("403", "PERMISSION_DENIED")
        assert "--control-token-file" in error.message()
        error = refusal(call, "id", headers=headers(CONTROL))
        assert "explicit model load / unload is not allowed" in error.message()  # past the guard


def test_every_call_that_changes_something_needs_control(client: Client) -> None:
    raw = client.raw
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (raw.register_system_shared_memory, ("r", "/k", 4)),
        (raw.unregister_system_shared_memory, ("r",)),
        (raw.register_cuda_shared_memory, ("r", b"aGFuZGxl", 0, 4)),
        (raw.unregister_cuda_shared_memory, ()),
        (raw.update_trace_settings, (None, {"trace_rate": "7"})),
        (raw.update_log_settings, ({"log_info": True},)),
    ]
    for call, arguments in calls:
        status = client.status(refusal(call, *arguments, headers=headers(INFER)))
        assert status in ("403", "PERMISSION_DENIED"), call
    assert raw.update_log_settings({"log_info": True}, headers=headers(CONTROL))
    raw.unregister_system_shared_memory(headers=headers(CONTROL))


def test_listings_need_no_control_and_health_no_token(client: Client) -> None:
    assert client.raw.get_model_repository_index(headers=headers(INFER))
    client.raw.get_system_shared_memory_status(headers=headers(INFER))
    client.raw.get_inference_statistics(headers=headers(INFER))
    assert client.raw.is_server_live()
    assert client.raw.is_server_ready()


def status_of(
    server: Running, method: str, path: str, body: bytes | None, sent: Mapping[str, str] | None = None
) -> int:
    """The status of an answer whose body is not read: the live page's events do not end."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as connection:
        connection.request(method.upper(), path, body, dict(sent or {}))
        return connection.getresponse().status


def test_the_openapi_document_says_what_needs_a_token(guarded: Running) -> None:
    document = ask(guarded, "GET", "/v2/openapi.json", headers=headers(INFER)).json
    (scheme,) = document["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for path, item in document["paths"].items():
        for method in item.keys() & {"get", "post"}:
            security = item[method].get("security", document["security"])
            roles = {role for need in security for role in need.get("bearer", [])}
            filled = re.sub(r"{\w+}", "1", path.replace("{order}", "load"))
            status = status_of(guarded, method, filled, b"{}" if method == "post" else None)
            assert bool(roles) == (status == 401), path
            with_token = status_of(guarded, method, filled, b"{}", headers(INFER))
            assert ("control" in roles) == (with_token == 403), path


def test_no_route_is_left_without_a_guard(guarded: Running) -> None:
    for endpoint in endpoints(guarded.server.plane, 1):
        for pattern in endpoint.paths:
            path = re.sub(r"\{\w+(:[^{}]+)?\}", "1", pattern.replace("{order:(un)?load}", "load"))
            answer = ask(guarded, endpoint.method, path, b"")
            assert answer.status == (200 if path.startswith("/v2/health/") else 401), path


def test_no_grpc_call_is_left_without_a_guard(guarded: Running) -> None:
    with grpc.insecure_channel(guarded.grpc) as channel:
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            path = f"/inference.GRPCInferenceService/{method.name}"
            if method.client_streaming:
                call = channel.stream_stream(path)
                with pytest.raises(grpc.RpcError) as caught:
                    list(call(iter([b""]), timeout=10))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            elif method.name not in ("ServerLive", "ServerReady"):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(path)(b"", timeout=10)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1


def test_a_grpc_stream_with_a_token_is_served(guarded: Running) -> None:
    answers: list[Any] = []
    client = triton_grpc.InferenceServerClient(guarded.grpc)
    client.start_stream(lambda result, error: answers.append(error or result), headers=headers(INFER))
    tensor = triton_grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    client.async_stream_infer("id", [tensor])
    client.stop_stream()
    assert answers[0].as_numpy("y").tolist() == [[1, 1, 1, 1]]


def test_http_says_how_to_authenticate(guarded: Running) -> None:
    missing = ask(guarded, "GET", "/v2")
    assert (missing.status, missing.headers["www-authenticate"]) == (401, 'Bearer realm="cohabit"')
    assert "Authorization: Bearer TOKEN" in missing.error
    wrong = ask(guarded, "GET", "/v2", headers={"Authorization": f"bearer {WRONG}"})
    assert 'error="invalid_token"' in wrong.headers["www-authenticate"]
    assert ask(guarded, "GET", "/v2", headers={"Authorization": f"Basic {INFER}"}).status == 401
    assert ask(guarded, "GET", "/v2", headers={"Authorization": f"bearer  {INFER} "}).status == 200


def test_metrics_need_a_token(guarded: Running) -> None:
    for port in (MetricsPort(guarded), guarded):
        assert ask(port, "GET", "/metrics").status == 401
        assert ask(port, "GET", "/metrics", headers=headers(INFER)).status == 200


def test_tokens_are_never_logged(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for token in (INFER, CONTROL, WRONG):
            ask(guarded, "GET", "/v2", headers=headers(token))
    assert not any(token in caplog.text for token in (INFER, CONTROL, WRONG))
    assert INFER not in repr(open_access(guarded.server._config))


def test_each_kind_of_token_file_guards_its_calls_alone(tmp_path: Path) -> None:
    assert open_access(config()) == OPEN
    access = open_access(config(token_files=token_file(tmp_path, "t", INFER)))
    with refused("PermissionMissing", match="start it with a --control-token-file"):
        access.require(f"Bearer {INFER}", Permission.CONTROL)
    access.require(None, Permission.HEALTH)
    with pytest.raises(Unauthenticated):
        access.require(None, Permission.METRICS)
    access = open_access(config(control_token_files=token_file(tmp_path, "t", CONTROL)))
    access.require(None, Permission.INFERENCE)
    access.require(f"Bearer {CONTROL}", Permission.CONTROL)
    with pytest.raises(Unauthenticated):
        access.require(None, Permission.CONTROL)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "has no token"),
        (("# only a comment",), "has no token"),
        (("short",), "line 1: a token is 16 to 512 printable characters"),
        ((INFER, "with a space in the token"), "line 2"),
        (("é" * 20,), "line 1"),
    ],
)
def test_token_files_that_cannot_be_stop_the_start(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_access(config(token_files=token_file(tmp_path, "tokens", *lines)))
    assert "tokens" in str(caught.value)
    assert not any(line in str(caught.value) for line in lines)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read: No such file"):
        open_access(config(control_token_files=(tmp_path / "nowhere",)))


async def test_ports_beyond_loopback_without_tokens_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for files, warnings in (((), 1), (token_file(tmp_path, "t", INFER), 0)):
        caplog.clear()
        server = Server(config(hosts=("0.0.0.0",), token_files=files))
        await server.start()
        await server.stop()
        assert len([r for r in caplog.records if "every client that reaches the ports" in r.message]) == warnings


async def test_ports_that_are_off_do_not_listen() -> None:
    server = Server(config(grpc_port=None, metrics_port=None))
    await server.start()
    listening = (server.grpc_address, server.metrics_url)
    await server.stop()
    assert listening == (None, "")

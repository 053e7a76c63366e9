"""Requests by hand, as no well-behaved client would send them."""

import http.client
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

HEADER_LENGTH = "Inference-Header-Content-Length"


class Listening(Protocol):
    """A server's addresses: host and port of HTTP, the port alone, and host and port of gRPC."""

    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def grpc(self) -> str: ...


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert list(self.json) == ["error"]
        message: str = self.json["error"]
        return message


def ask(
    server: Listening,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send one request on its own connection; an iterable goes chunk by chunk."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def infer(
    server: Listening, model: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(server, "POST", f"/v2/models/{model}/infer", raw, headers)


def infer_binary(server: Listening, model: str, header: Mapping[str, Any], binary: bytes) -> Answer:
    raw = json.dumps(header).encode()
    return infer(server, model, raw + binary, {HEADER_LENGTH: str(len(raw))})


def x(data: Any = None, **changes: Any) -> dict[str, Any]:
    """The input of the identity models."""
    made = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4] if data is None else data}
    made.update(changes)
    return {key: value for key, value in made.items() if value is not None}


def binary_x(size: Any, **changes: Any) -> dict[str, Any]:
    made = x(parameters={"binary_data_size": size}, **changes)
    del made["data"]
    return made

"""Overload, cancellation, loading, draining: what happens to requests when things get tight."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from server.engine.statistics import FailureReason
from server_fakes import FakeServable, Gate, Running, identity, running, serving
from server_http import HEADER_LENGTH, Answer, ask, infer, x


def eventually(condition: Callable[[], bool], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@dataclass
class Slow:
    """A server whose model `slow` waits at a gate, and clients to send to it with."""

    server: Running
    gate: Gate
    servable: FakeServable
    clients: ThreadPoolExecutor

    def send(self, **parameters: object) -> Future[Answer]:
        return self.clients.submit(infer, self.server, "slow", {"inputs": [x()], "parameters": parameters})

    def occupy(self) -> Future[Answer]:
        """Send the request that everything else waits behind."""
        answer = self.send()
        assert self.gate.entered.wait(10)
        return answer

    def queue(self, count: int = 1) -> list[Future[Answer]]:
        answers = [self.send() for _ in range(count)]
        eventually(lambda: self.pending() == count)
        return answers

    def pending(self, model: str = "slow") -> int:
        return self.server.server._lanes.pending(model)

    def failures(self, reason: FailureReason) -> int:
        return self.server.server.registry.find("slow").statistics.failures[reason]


@contextmanager
def slow_server(**changes: object) -> Iterator[Slow]:
    gate = Gate()
    servable = FakeServable(identity("slow", "FP32").info, gate)
    with (
        ThreadPoolExecutor(16) as clients,
        running(serving(servable, identity("quick", "FP32")), **changes) as server,
    ):
        try:
            yield Slow(server, gate, servable, clients)
        finally:
            gate.open.set()


def raw_request(model: str = "slow") -> bytes:
    body = json.dumps({"inputs": [x()]}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_full_queue_is_503_and_the_others_are_answered() -> None:
    with slow_server(queue_limit=2) as slow:
        accepted = [slow.occupy(), *slow.queue(2)]
        refused = slow.send().result()
        assert refused.status == 503
        assert "Exceeds maximum queue size: 2 requests wait for model 'slow'" in refused.error
        slow.gate.open.set()
        assert [answer.result().json["outputs"][0]["data"] for answer in accepted] == [[1, 2, 3, 4]] * 3
        assert slow.failures("REJECTED") == 0


def test_request_that_cannot_be_in_time_is_503_while_the_device_is_still_busy() -> None:
    with slow_server() as slow:
        first, patient = slow.occupy(), slow.send(timeout=60_000_000)
        hasty = slow.send(timeout=100_000).result()
        assert hasty.status == 503
        assert "Request timeout expired" in hasty.error
        assert slow.failures("REJECTED") == 1
        assert not slow.gate.open.is_set()
        slow.gate.open.set()
        assert (first.result().status, patient.result().status) == (200, 200)
        assert len(slow.servable.calls) == 2


def test_refused_requests_are_told_when_to_come_back() -> None:
    with slow_server(queue_limit=1) as slow:
        slow.occupy()
        slow.queue()
        refused = slow.send().result()
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1


def test_request_of_a_client_that_left_never_runs() -> None:
    with slow_server() as slow:
        first = slow.occupy()
        with socket.create_connection(("127.0.0.1", slow.server.port)) as client:
            client.sendall(raw_request())
            eventually(lambda: slow.pending() == 1)
        eventually(lambda: slow.pending() == 0)
        slow.gate.open.set()
        assert (first.result().status, slow.send().result().status) == (200, 200)
        assert len(slow.servable.calls) == 2
        assert slow.failures("CANCELED") == 1


def test_client_that_leaves_while_its_request_runs_disturbs_nothing() -> None:
    with slow_server() as slow:
        with socket.create_connection(("127.0.0.1", slow.server.port)) as client:
            client.sendall(raw_request())
            assert slow.gate.entered.wait(10)
        eventually(lambda: all(future.done() for future in slow.server.server._lanes[0]._waiting.values()))
        slow.gate.open.set()
        assert slow.send().result().status == 200
        assert slow.failures("CANCELED") == 0  # it was executed, and is counted as that


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_client_that_leaves_amid_its_body_disturbs_nothing(server: Running, share: float) -> None:
    request = raw_request("id_fp64")
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request[: int(len(request) * share)])
    assert infer(server, "id_fp64", {"inputs": [x(datatype="FP64")]}).status == 200


def test_what_is_not_http_disturbs_nothing(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        assert b"400" in client.recv(4096)
    assert infer(server, "id_fp64", {"inputs": [x(datatype="FP64")]}).status == 200


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000, "8190"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\nno colon", "header"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1", "8190"),
        (b"nonsense", ""),
    ],
    ids=["long header", "bad header", "long path", "nonsense"],
)
def test_what_never_becomes_a_request_is_an_error_in_json_like_all_others(
    server: Running, head: bytes, reason: str
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head + b"\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    status_line, _, rest = answer.partition(b"\r\n")
    headers, _, body = rest.partition(b"\r\n\r\n")
    assert status_line.split()[1] == b"400"
    assert b"content-type: application/json" in headers.lower()
    assert reason in json.loads(body)["error"]
    assert len(body) < 400
    assert ask(server, "GET", "/v2/health/live").status == 200


def test_what_nobody_foresaw_is_500_with_an_incident(caplog: pytest.LogCaptureFixture) -> None:
    forgetful = FakeServable(identity("forgetful", "FP32").info, lambda x: {})
    nonsense = FakeServable(identity("nonsense", "FP32").info, lambda x: {"y": None})  # type: ignore[dict-item]
    with running(serving(forgetful, nonsense)) as server:
        answer = infer(server, "forgetful", {"inputs": [x()]})
        assert (answer.status, answer.error) == (500, "model 'forgetful' failed to execute: it returned no y")
        answer = infer(server, "nonsense", {"inputs": [x()]})
        assert answer.status == 500
        (record,) = (record for record in caplog.records if record.name == "cohabit.http")
        assert f"internal error {record.fields['incident']}" in answer.error  # type: ignore[attr-defined]
        assert ask(server, "GET", "/v2/health/live").status == 200


def test_drain_answers_what_is_in_flight_and_refuses_the_rest() -> None:
    with slow_server() as slow:
        in_flight = [slow.occupy(), *slow.queue()]
        stopping = slow.clients.submit(slow.server.stop)
        eventually(lambda: slow.server.server._lanes.draining)
        refused = slow.send().result()
        assert refused.status == 503
        assert "stopping" in refused.error
        assert ask(slow.server, "GET", "/v2/health/ready").status == 400
        assert ask(slow.server, "GET", "/v2/models/slow/ready").status == 400
        assert ask(slow.server, "GET", "/v2/health/live").status == 200
        slow.gate.open.set()
        assert [answer.result().status for answer in in_flight] == [200, 200]
        assert stopping.result() is True


def test_drain_gives_up_on_a_device_that_hangs() -> None:
    with slow_server(exit_timeout_s=0.05) as slow:
        stuck = [slow.occupy(), *slow.queue()]
        assert slow.server.stop() is False
        assert [answer.result().status for answer in stuck] == [503, 503]


def test_many_clients_get_their_own_answers(server: Running) -> None:
    def one(number: int) -> bool:
        values = np.full((1, 4), number, np.float64)
        answer = infer(server, "id_fp64", values.tobytes(), {HEADER_LENGTH: "0"})
        return answer.body.endswith(values.tobytes())

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(one, range(300)))

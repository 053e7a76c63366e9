"""What happens to requests when the queue is full, clients leave, models fail, and the server stops."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from cohabit.server.ipc.statistics import ModelStatistics
from tests.support.server.server_fakes import FakeServable, Gate, Running, eventually, identity, running, serving
from tests.support.server.server_http import HEADER_LENGTH, Answer, ask, infer, x

pytestmark = pytest.mark.process


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
        """Send the request after which everything else waits."""
        answer = self.send()
        assert self.gate.entered.wait(20)
        return answer

    def queue(self, count: int = 1) -> list[Future[Answer]]:
        answers = [self.send() for _ in range(count)]
        eventually(lambda: self.pending == count)
        return answers

    @property
    def pending(self) -> int:
        return self.server.engine.report().models["slow", 1].pending

    @property
    def statistics(self) -> ModelStatistics:
        return self.server.engine.report().models["slow", 1].statistics


@contextmanager
def slow_server(max_batch: int = 8, **changes: object) -> Iterator[Slow]:
    gate = Gate()
    servable = FakeServable(identity("slow", "FP32", max_batch=max_batch).info, gate)
    with ThreadPoolExecutor(16) as clients, running(serving(servable), **changes) as server:
        try:
            yield Slow(server, gate, servable, clients)
        finally:
            gate.open.set()


def raw_request() -> bytes:
    body = json.dumps({"inputs": [x()]}).encode()
    return f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("max_batch", [1, 8], ids=["refused by the front end", "refused by the engine"])
def test_a_full_queue_is_503_and_the_others_are_answered(max_batch: int) -> None:
    with slow_server(max_batch, queue_limit=2) as slow:
        accepted = [slow.occupy(), *slow.queue(2)]
        refused = slow.send().result()
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.error.startswith("[request id: <id_unknown>] Exceeds maximum queue size: 2 requests wait")
        slow.gate.open.set()
        assert [answer.result().json["outputs"][0]["data"] for answer in accepted] == [[1, 2, 3, 4]] * 3
        assert slow.statistics.failures["REJECTED"] == 0
        assert slow.statistics.rejections["queue_full"] == 1


def test_a_request_that_cannot_be_in_time_is_503_while_the_device_is_still_busy() -> None:
    with slow_server() as slow:
        first, patient = slow.occupy(), slow.send(timeout=600_000_000)
        hasty = slow.send(timeout=100_000).result()
        assert hasty.status == 503
        assert "Request timeout expired" in hasty.error
        assert slow.statistics.failures["REJECTED"] == slow.statistics.rejections["deadline"] == 1
        slow.gate.open.set()
        assert (first.result().status, patient.result().status) == (200, 200)
        assert len(slow.servable.calls) == 2


def test_a_client_that_leaves_takes_its_queued_request_out_and_not_one_that_runs() -> None:
    with slow_server() as slow:
        with socket.create_connection(("127.0.0.1", slow.server.port)) as client:
            client.sendall(raw_request())
            assert slow.gate.entered.wait(20)
            with socket.create_connection(("127.0.0.1", slow.server.port)) as other:
                other.sendall(raw_request())
                eventually(lambda: slow.pending == 1)
            eventually(lambda: slow.pending == 0)
        slow.gate.open.set()
        assert slow.send().result().status == 200
        assert len(slow.servable.calls) == 2
        assert (slow.statistics.failures["CANCELED"], slow.statistics.answered.count) == (1, 2)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_client_that_leaves_amid_its_request_leaves_no_memory_taken(share: float) -> None:
    with slow_server() as slow:
        slow.gate.open.set()
        request = raw_request()
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", slow.server.port)) as client:
                client.sendall(request[: int(len(request) * share)])
        assert slow.send().result().status == 200
        eventually(lambda: slow.server.server.plane.memory.used_bytes == 0)
        assert slow.statistics.answered.count == 1


def test_a_model_that_answers_nonsense_is_500_and_the_server_lives_on(caplog: pytest.LogCaptureFixture) -> None:
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
        assert server.server.plane.memory.used_bytes == 0


def test_stopping_answers_what_is_in_flight_and_refuses_the_rest() -> None:
    with slow_server() as slow:
        in_flight = [slow.occupy(), *slow.queue()]
        stopping = slow.clients.submit(slow.server.stop)
        eventually(lambda: ask(slow.server, "GET", "/v2/health/ready").status == 400)
        refused = slow.send().result()
        assert refused.status == 503
        assert "stopping" in refused.error
        assert ask(slow.server, "GET", "/v2/models/slow/ready").status == 400
        assert ask(slow.server, "GET", "/v2/health/live").status == 200
        slow.gate.open.set()
        assert [answer.result().status for answer in in_flight] == [200, 200]
        assert stopping.result() is True


def test_stopping_abandons_a_device_that_hangs() -> None:
    with slow_server(exit_timeout_s=0.0) as slow:
        stuck = [slow.occupy(), *slow.queue()]
        assert slow.server.stop() is False
        assert [answer.result().status for answer in stuck] == [503, 503]


def test_many_clients_get_their_own_answers(server: Running) -> None:
    def one(number: int) -> bool:
        values = np.full((1, 4), number, np.float64)
        answer = infer(server, "id_fp64", values.tobytes(), {HEADER_LENGTH: "0"})
        return answer.body.endswith(values.tobytes())

    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(one, range(100)))

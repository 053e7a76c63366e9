"""Several front ends on one port, for one engine."""

import asyncio
import functools
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest
import uvloop

from cohabit.server.config.config import check_consistent
from cohabit.server.errors import ConfigError
from cohabit.server.frontend.supervisor import Supervisor
from cohabit.server.serve import Server
from tests.server import fake_engine, frontends
from tests.server.server_fakes import config, eventually, write_repository

CONNECTIONS = 48
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two front ends for the fake engine; the first one lives here. Whatever a test kills is started again."""
    folder = tmp_path_factory.mktemp("engine")
    before = set(psutil.Process().children(recursive=True))
    write_repository(folder / "repository", frontends.MODELS)
    http_port, grpc_port, metrics_port = free_ports(3)
    both = config(
        repository=folder / "repository",
        engine="process",
        frontends=2,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        watchdog_s=2.0,
    )
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Server:
        made = Server(both, engine_command=frontends.COMMAND)
        await made.start()
        await made.load()
        return made

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FAKE_ENGINE", str(folder))
        made = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        try:
            yield made
        finally:
            clean = asyncio.run_coroutine_threadsafe(made.stop(), loop).result(60)
            asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(20)
            loop.close()
    assert clean
    assert not set(psutil.Process().children(recursive=True)) - before


def port_of(server: Server) -> int:
    return int(server.http_url.rpartition(":")[2])


def connections_of(pid: int, port: int) -> int:
    """How many clients a process has on a port."""
    found = psutil.Process(pid).net_connections("tcp")
    return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)


def front_ends_on(port: int) -> list[int]:
    """The processes beside this one that accept clients on a port."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any(c.laddr.port == port for c in child.net_connections("tcp")):
                found.append(child.pid)
    return found


def other_front_end(port: int) -> int:
    eventually(lambda: len(front_ends_on(port)) == 1)
    return front_ends_on(port)[0]


def is_ready(connection: http.client.HTTPConnection) -> bool:
    """Whether the front end that this connection has reached has the engine's models."""
    connection.request("GET", "/v2/health/ready")
    response = connection.getresponse()
    response.read()
    return response.status == 200


def infer(connection: http.client.HTTPConnection) -> list[float]:
    connection.request("POST", "/v2/models/double/infer", BODY)
    response = connection.getresponse()
    body = response.read()
    assert response.status == 200, body
    data: list[float] = json.loads(body)["outputs"][0]["data"]
    return data


@contextmanager
def answered_connections(port: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Connections of which each had an answer."""
    with ExitStack() as stack:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(CONNECTIONS)]
        for connection in connections:
            stack.callback(connection.close)
            eventually(functools.partial(is_ready, connection))
            assert infer(connection) == [2.0, 4.0, 6.0, 8.0]
        yield connections


def test_two_front_ends_share_a_port_and_an_engine_that_is_restarted(server: Server) -> None:
    port = port_of(server)
    other = other_front_end(port)
    with answered_connections(port) as connections:
        shares = [connections_of(pid, port) for pid in (os.getpid(), other)]
        assert shares[1] > 0, "the other front end accepts clients"
        assert shares[1] < CONNECTIONS, "and so does the first"
        assert isinstance(server.supervisor, Supervisor)
        assert server.supervisor.pid is not None
        os.kill(server.supervisor.pid, signal.SIGKILL)
        for connection in connections:
            assert infer(connection) == [2.0, 4.0, 6.0, 8.0]


def test_a_hang_in_a_request_of_the_other_front_end_ends_the_engine(server: Server) -> None:
    port = port_of(server)
    other = psutil.Process(other_front_end(port))
    with answered_connections(port) as connections:
        theirs = {c.raddr.port for c in other.net_connections("tcp") if c.raddr}
        held = next(c for c in connections if c.sock.getsockname()[1] in theirs)
        values = [fake_engine.HELD] * 4
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": values}
        held.request("POST", "/v2/models/double/infer", json.dumps({"inputs": [tensor]}))
        answer = held.getresponse()
        assert answer.status == 500
        assert b"died twice while it executed this request" in answer.read()
        for connection in connections:
            assert infer(connection) == [2.0, 4.0, 6.0, 8.0]


def test_a_front_end_that_dies_is_started_again(server: Server) -> None:
    port = port_of(server)
    first = other_front_end(port)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: front_ends_on(port) not in ([], [first]))
    again = other_front_end(port)
    with answered_connections(port):
        assert connections_of(again, port) > 0


def test_what_front_ends_would_not_share_is_refused(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    try:
        for path, body in (
            ("/v2/logging", {"log_verbose_level": 1}),
            ("/v2/trace/setting", {"trace_level": ["OFF"]}),
            ("/v2/systemsharedmemory/region/a/register", {"key": "/a", "byte_size": 8}),
        ):
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            assert response.status == 501, response.read()
            response.read()
    finally:
        connection.close()


def test_shared_memory_and_traces_need_a_single_front_end() -> None:
    for changes in ({"client_shm": "on"}, {"trace": {"file": "t.json"}}, {"engine": "in-process"}):
        ports = {"http_port": 1, "grpc_port": 2, "metrics_port": 3}
        with pytest.raises(ConfigError, match="--frontends"):
            check_consistent(config(**({"engine": "process", "frontends": 2} | ports | changes)))

"""The benchmarks' own client, against a server that answers as it is told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from benchmarks.overload import answer_times_s
from benchmarks.wire import NO_ANSWER, Connections, post


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def answer(request: web.Request) -> web.Response:
        order = await request.text()
        if order == "leave":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=503 if order == "refuse" else 200, body=b"x" * 100_000)

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_statuses_come_back_and_connections_that_fail_are_replaced(port: int) -> None:
    connections = Connections("127.0.0.1", port, 10.0)

    async def ask(order: bytes) -> int:
        return await connections.ask(post("localhost", "/", {}, order))

    assert [await ask(order) for order in (b"", b"refuse", b"leave", b"")] == [200, 503, NO_ANSWER, 200]
    assert await asyncio.gather(*(ask(b"refuse") for _ in range(20))) == [503] * 20
    connections.close()


async def test_a_server_that_is_not_there_is_no_answer() -> None:
    connections = Connections("127.0.0.1", 1, 10.0)
    assert await connections.ask(post("localhost", "/", {}, b"")) == NO_ANSWER
    connections.close()


def test_answer_times_are_those_of_whole_requests_without_errors(tmp_path: Path) -> None:
    def span(
        name: str, begin: float, end: float, args: dict[str, str], stage_end: float
    ) -> list[dict[str, object]]:
        return [
            {"ph": "b", "id": name, "ts": begin, "args": args},
            {"ph": "b", "id": name, "ts": begin, "args": {}},
            {"ph": "e", "id": name, "ts": stage_end},
            {"ph": "e", "id": name, "ts": end},
        ]

    events = [
        {"ph": "M", "args": {"name": "requests"}},
        *span("early", 1e6, 2e6, {"trace_id": "1"}, 1.5e6),
        *span("good", 5e6, 5.25e6, {"trace_id": "2"}, 5.1e6),
        *span("refused", 6e6, 7e6, {"trace_id": "3", "error": "RequestTimedOut"}, 6.5e6),
    ]
    file = tmp_path / "spans.json"
    file.write_bytes(msgspec.json.encode(events))
    assert answer_times_s(file, 4e6) == [0.25]

"""The live feed: what it says of a server, to whom, and what it costs while no one watches."""

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cohabit.planner.shapes import Bucket
from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import Overloaded
from cohabit.server.frontend.ensembles import Ensembles
from cohabit.server.http import live_page
from cohabit.server.ipc.catalog import Catalog, ModelEntry, ModelState
from cohabit.server.ipc.model import ArenaExtent, DeviceUse, ModelFootprint, ModelKey
from cohabit.server.ipc.request import Timing
from cohabit.server.ipc.spans import DeviceSpan
from cohabit.server.ipc.statistics import EngineReport, ModelCounters, ModelStatistics
from cohabit.server.observe.settings import TraceSettings
from cohabit.server.observe.trace_file import TraceFile
from cohabit.server.observe.tracing import Tracer
from cohabit.server.view.live import LiveFeed
from tests.support.server.server_fakes import (
    FakeLoaded,
    Running,
    adder,
    config,
    eventually,
    identity,
    running,
    serving,
)
from tests.support.server.server_http import ask, infer, x

pytestmark = pytest.mark.process

TOKEN, CONTROL = "infer-token-0123456789", "control-token-0123456789"
A, B = ModelKey("a", 1), ModelKey("b", 1)
MIB = 1 << 20


class Reporting:
    """An engine's client that counts how often it is asked."""

    def __init__(self, *entries: ModelEntry) -> None:
        self.catalog = Catalog(strict_readiness=False)
        for entry in entries:
            self.catalog.update(entry)
        self.unavailable: str | None = None
        self.restarts = 0
        self.waiting = 0
        self.asked = 0
        self.now = EngineReport()

    async def report(self) -> EngineReport:
        self.asked += 1
        return self.now


class Feed:
    """A feed whose clock the test sets, and which makes the next document as soon as the one before is taken."""

    def __init__(self, client: Reporting, tracer: Tracer | None = None, **changes: object) -> None:
        self.client = client
        self.now_s = 100.0
        self.draining = False
        self.tracer = tracer or Tracer()
        serve_config: ServeConfig = config(**changes)
        self.feed = LiveFeed(
            serve_config,
            Ensembles(client, None),  # type: ignore[arg-type]
            self.tracer,
            lambda: self.draining,
            lambda: self.now_s,
            period_s=0.0,
        )

    async def documents(self) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(self.feed.documents()) as documents:
            async for document in documents:
                yield json.loads(document)

    async def after(self, seconds: float, change: Callable[[], None]) -> dict[str, Any]:
        """Return the document after a change, this long after the first one."""
        async with aclosing(self.documents()) as documents:
            await anext(documents)
            change()
            self.now_s += seconds
            asked = self.client.asked
            while (document := await anext(documents)) and self.client.asked < asked + 2:
                pass
            return document


def ready(key: ModelKey, **footprint: Any) -> ModelEntry:
    info = identity(key.name, "FP32").info
    return ModelEntry(key.name, key.version, ModelState.READY, info=info, footprint=ModelFootprint(**footprint))


def counted(answers: int, swapped_bytes: int = 0, rejected: int = 0) -> ModelCounters:
    statistics = ModelStatistics()
    for _ in range(answers):
        statistics.executed([Timing(0.0, 0.0, 0.01, 0.01, swapped_bytes=swapped_bytes)], 0.0)
    if rejected:
        statistics.rejected("queue_full", rejected)
    return ModelCounters(statistics, pending=2, correction=1.25)


def row(document: dict[str, Any], name: str = "a") -> dict[str, Any]:
    (found,) = (model for model in document["models"] if model["name"] == name)
    return found


async def test_rates_are_growth_over_the_time_between_two_readings() -> None:
    client = Reporting(ready(A, predicted_s={Bucket(1): 0.5}))
    client.now = EngineReport({A: counted(10, rejected=1)})

    def more() -> None:
        client.now = EngineReport({A: counted(30, swapped_bytes=MIB, rejected=5)})

    model = row(await Feed(client).after(4.0, more))
    assert (model["answered"], model["refused"]) == ([5.0, "1/s"], [1.0, "1/s"])
    assert model["copied"] == [30 * MIB / 4, "bytes/s"]
    assert model["copied_each"] == [30 * MIB / 20, "bytes"]
    assert (model["waiting"], model["measured"], model["predicted"]) == ([2, "count"], [1.25, "times"], [0.5, "s"])


async def test_counters_of_a_new_engine_are_counted_from_zero() -> None:
    client = Reporting(ready(A))
    client.now = EngineReport({A: counted(1000)})

    def restarted() -> None:
        client.restarts = 1
        client.now = EngineReport({A: counted(8)})

    document = await Feed(client).after(2.0, restarted)
    assert row(document)["answered"] == [4.0, "1/s"]
    assert document["restarts"] == 1


def figure(document: dict[str, Any], name: str) -> Any:
    (found,) = (one for one in document["figures"] if one["name"] == name)
    return found["value"]


async def test_tokens_are_those_of_the_last_seconds_and_told_only_if_texts_are_generated() -> None:
    feed = Feed(Reporting(ready(A)))
    without = await feed.after(4.0, lambda: None)
    assert not any("token" in one["name"] for one in without["figures"])

    def generate() -> None:
        feed.feed.generated(9.0, True)  # too long ago when the document is made
        feed.now_s += 8.0
        for waited_s, first in [(0.5, True), (0.01, False), (0.02, False), (0.03, False)]:
            feed.feed.generated(waited_s, first)

    document = await feed.after(4.0, generate)
    assert figure(document, "tokens") == [pytest.approx(4 / 10), "1/s"]
    assert figure(document, "first token p99") == [0.5, "s"]
    (told,) = (one["note"] for one in document["figures"] if one["name"] == "first token p99")
    assert told[1] == [0.02, "s"]


async def test_what_has_not_run_has_no_measured_time_and_what_waits_for_a_restart_is_counted() -> None:
    client = Reporting(ready(A, predicted_s={Bucket(1): 0.5}))
    client.now = EngineReport({A: counted(0)})
    feed = Feed(client)

    def down() -> None:
        client.unavailable, client.waiting = "the engine is restarting", 7

    document = await feed.after(1.0, down)
    assert row(document)["measured"] == [None, "times"]
    assert figure(document, "waiting") == [7, "count"], "the last report of the engine that has ended had two"
    assert document["uptime"] == [1.0, "s"]
    assert document["layout"] == "partitioned"
    assert figure(document, "memory")[0] > 1 << 20


async def test_latencies_are_those_of_the_last_seconds() -> None:
    client = Reporting(ready(A), ready(B))
    feed = Feed(client)

    def answered() -> None:
        feed.feed.answered(A, 9.0)
        feed.now_s += 60.0
        for n in range(1, 101):
            feed.feed.answered(A, n * 1e-3)

    document = await feed.after(1.0, answered)
    assert (row(document)["p50"], row(document)["p99"]) == ([0.05, "s"], [0.099, "s"])
    assert row(document, "b")["p50"] == [None, "s"]


async def test_memory_is_described_from_its_first_byte_to_its_last() -> None:
    client = Reporting(ready(A, resident_bytes=3 * MIB, parameter_bytes=9 * MIB))
    extents = (
        ArenaExtent("partition", 12 * MIB, 4 * MIB, A),
        ArenaExtent("workspace", 0, 2 * MIB),
        ArenaExtent("free", 2 * MIB, 9 * MIB),
        ArenaExtent("partition", 11 * MIB, MIB),
        ArenaExtent("partition", 16 * MIB, 0, B),
    )
    client.now = EngineReport({A: counted(0)}, DeviceUse(extents=extents))
    document = await Feed(client).after(1.0, lambda: None)
    parts = document["arena"]
    assert [(part["use"], part["name"], part["nbytes"] // MIB) for part in parts] == [
        ("workspace", "workspace", 2),
        ("free", "free", 9),
        ("partition", "partition", 1),
        ("partition", "a", 4),
    ]
    assert all(one["offset"] + one["nbytes"] == two["offset"] for one, two in pairwise(parts))
    assert parts[-1]["resident_bytes"] == 3 * MIB
    assert [6 * MIB, "bytes"] in parts[-1]["words"], "what is streamed"


async def test_a_model_that_is_not_served_has_its_state_and_the_reason() -> None:
    evil = "<img src=x onerror=alert(1)>"
    client = Reporting(
        ready(A),
        ModelEntry(evil, 2, ModelState.UNAVAILABLE, "model.pt2 is truncated"),
        ModelEntry("new", None, ModelState.ABSENT, wanted=False),
        ModelEntry("old", 1, ModelState.UNAVAILABLE, "unloaded", wanted=False),
    )
    document = await Feed(client, model_control="explicit").after(1.0, lambda: None)
    states = {model["name"]: (model["state"], model["reason"]) for model in document["models"]}
    assert states == {
        "a": ("ready", ""),
        evil: ("unavailable", "model.pt2 is truncated"),
        "new": ("not loaded", ""),
        "old": ("not loaded", ""),
    }
    assert row(document, "new")["answered"] == [None, "1/s"]
    assert document["control"] is True


async def test_it_says_that_the_engine_is_down_and_that_it_is_back() -> None:
    client = Reporting(ready(A))
    feed = Feed(client)

    def dies() -> None:
        client.unavailable = "the engine is being restarted"

    document = await feed.after(1.0, dies)
    assert (document["down"], document["trouble"]) == (True, "the engine is being restarted")
    client.unavailable = None
    document = await feed.after(1.0, lambda: None)
    assert (document["down"], document["trouble"]) == (False, None)


async def test_one_document_is_made_for_all_and_none_while_no_one_watches() -> None:
    client = Reporting(ready(A))
    feed = Feed(client)
    feed.feed.answered(A, 1.0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.asked == 0
    async with aclosing(feed.feed.documents()) as one, aclosing(feed.feed.documents()) as two:
        first = await asyncio.gather(anext(one), anext(two))
        assert first[0] is first[1]
        assert row(json.loads(first[0]))["p50"] == [None, "s"], "what came before anyone watched was not kept"
    asked = client.asked
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.asked == asked, "the last one has left"


async def test_the_seventeenth_watcher_is_refused_until_another_leaves() -> None:
    feed = Feed(Reporting(ready(A)))
    watchers = [feed.feed.documents() for _ in range(16)]
    await asyncio.gather(*(anext(watcher) for watcher in watchers))
    with pytest.raises(Overloaded, match="16 pages watch this server already"):
        await anext(feed.feed.documents())
    await watchers.pop().aclose()
    watchers.append(feed.feed.documents())
    assert await anext(watchers[-1])
    for watcher in watchers:
        await watcher.aclose()


async def test_a_feed_ends_when_the_server_drains() -> None:
    feed = Feed(Reporting(ready(A)))
    documents = feed.documents()
    await anext(documents)
    feed.draining = True
    async with asyncio.timeout(20):
        assert [document async for document in documents]


async def test_a_feed_that_cannot_be_made_is_an_error_for_who_watches_and_begins_anew() -> None:
    client = Reporting(ready(A))
    feed = Feed(client)
    report = client.report

    async def broken() -> EngineReport:
        raise RuntimeError("a bug")

    client.report = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug"):
        await anext(feed.feed.documents())
    client.report = report  # type: ignore[method-assign]
    async with aclosing(feed.feed.documents()) as documents:
        assert await anext(documents)


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Tracer]:
    file = TraceFile(tmp_path / "trace.json")
    yield Tracer(TraceSettings(str(file.path), rate=10), file)
    file.close()


async def test_lanes_are_drawn_of_what_is_traced(traced: Tracer) -> None:
    feed = Feed(Reporting(ready(A)), traced)
    at = 100.0 + 1.0

    def execution() -> None:
        assert traced._watcher is not None
        traced._watcher(
            [
                DeviceSpan("a", "swap_in", "w1", at - 0.5, at - 0.4, MIB),
                DeviceSpan("a", "swap_in", "w2", at - 0.4, at - 0.3, MIB),
                DeviceSpan("a", "compute", "op1", at - 0.5, at - 0.45),
                DeviceSpan("a", "compute", "op2", at - 0.45, at - 0.4, stalled=True),
                DeviceSpan("a", "compute", "op2", at - 0.4, at - 0.2),
            ]
        )
        traced._watcher([DeviceSpan("a", "compute", "old", at - 60, at - 59)])

    document = await feed.after(1.0, execution)
    chart = document["chart"]
    drawn = {
        lane["name"]: [[*box[:3], *(chart["words"][n] for n in box[3])] for box in lane["boxes"]]
        for lane in chart["lanes"]
    }
    assert drawn == {
        "compute": [
            [-0.5, -0.2, "compute", "a", ["2 ops, stalled for ", [pytest.approx(0.05), "s"]]],
            [-0.45, -0.4, "stall", "a", "op op2 waits"],
        ],
        "swap in": [[-0.5, -0.3, "swap_in", "a", [[2 * MIB, "bytes"], " in 2 copies"]]],
    }
    assert document["tracing"].startswith("One of 10 requests of each model is traced")
    assert traced._watcher is None, "no one watches"


async def test_without_tracing_it_says_how_lanes_are_seen() -> None:
    document = await Feed(Reporting(ready(A))).after(1.0, lambda: None)
    assert document["chart"] is None
    assert "--trace-config file=FILE" in document["tracing"]


# ---- Over HTTP.


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    loaded: FakeLoaded = serving(adder(), identity("id", "FP32"))
    loaded.failures = {ModelKey("damaged", 1): "model.pt2 is truncated"}
    with running(loaded, strict_readiness=False) as handle:
        yield handle


@contextmanager
def events(server: Running, token: str | None = None) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request("GET", "/ui/events", headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()


def next_event(response: http.client.HTTPResponse) -> dict[str, Any]:
    line = response.readline()
    assert line.startswith(b"data: ")
    assert response.readline() == b"\n"
    document: dict[str, Any] = json.loads(line[len(b"data: ") :])
    return document


def test_the_page_is_at_the_root_and_permits_nothing_but_itself(own: Running) -> None:
    answer = ask(own, "GET", "/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert b"adder" not in answer.body, "it has nothing that a token could protect"


def test_events_follow_what_the_server_does(own: Running) -> None:
    with events(own) as response:
        assert response.getheader("Content-Type") == "text/event-stream"
        names = {model["name"]: model["state"] for model in next_event(response)["models"]}
        assert names == {"adder": "ready", "id": "ready", "damaged": "unavailable"}
        assert infer(own, "id", {"inputs": [x()]}).status == 200
        model = row(next_event(response), "id")
        assert model["p50"][0] > 0
        assert model["answered"][0] > 0


def test_without_the_setting_there_is_no_page() -> None:
    with running(serving(adder()), ui="off") as handle:
        assert ask(handle, "GET", "/").status == 404
        assert ask(handle, "GET", "/ui/events").status == 404


def test_events_need_the_token_that_metrics_need_and_the_page_none(tmp_path: Path) -> None:
    infer_tokens, control_tokens = tmp_path / "infer", tmp_path / "control"
    infer_tokens.write_text(TOKEN)
    control_tokens.write_text(CONTROL)
    with running(serving(adder()), token_files=(infer_tokens,), control_token_files=(control_tokens,)) as guarded:
        assert ask(guarded, "GET", "/").status == 200
        assert ask(guarded, "GET", "/ui/events").status == ask(guarded, "GET", "/metrics").status == 401
        for token in (TOKEN, CONTROL):
            with events(guarded, token) as response:
                assert next_event(response)["models"]


def test_a_server_that_is_watched_stops_at_once() -> None:
    with running(serving(adder())) as handle, events(handle) as response:
        next_event(response)
        assert handle.stop()
        while response.readline():
            pass


def test_a_client_that_leaves_makes_room_for_another(own: Running) -> None:
    for _ in range(20):
        with events(own) as response:
            next_event(response)
    feed = own.server._feed
    assert feed is not None

    async def left() -> None:
        async with asyncio.timeout(20):
            while feed._watchers:  # noqa: ASYNC110 - connections end when the server notices
                await asyncio.sleep(0.01)

    asyncio.run_coroutine_threadsafe(left(), own.loop).result(30)


def test_a_client_that_reads_nothing_keeps_no_place(own: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """With documents in quick succession: its buffers are soon full."""
    feed = own.server._feed
    assert feed is not None
    monkeypatch.setattr(feed, "_period_s", 0.02)
    monkeypatch.setattr(live_page, "_WRITE_S", 2.0)
    with socket.create_connection(("127.0.0.1", own.port)) as deaf, events(own) as response:
        deaf.sendall(b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        next_event(response)
        eventually(lambda: feed._watchers == 2)
        while feed._watchers == 2:
            next_event(response)  # one that reads is kept
        assert feed._watchers == 1
        next_event(response)

"""Texts as requests: what is asked for, when tokens come, and what counts as a failure."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cohabit.loadgen.arrivals import RequestArrival, TextSize
from cohabit.loadgen.client import connected, sender
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Outcome, RequestFailed, TokenTimes
from cohabit.loadgen.report import RunDescription, make_report
from cohabit.loadgen.texts import TextModel, TextSender

MODEL = TextModel("chat", TextSize(5, 3), 40)
Answer = Callable[[dict[str, Any]], list[dict[str, Any] | bytes] | int]


@asynccontextmanager
async def completions(answer: Answer) -> AsyncIterator[str]:
    """A server whose completions are these events, or this status."""

    async def post(request: web.Request) -> web.StreamResponse:
        found = answer(await request.json())
        if isinstance(found, int):
            return web.Response(status=found, text="too many texts")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in found:
            await response.write(
                b"data: %b\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode())
            )
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", post)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


async def sent(answer: Answer, size: TextSize | None = None) -> TokenTimes:
    async with completions(answer) as url, aiohttp.ClientSession() as session:
        return await TextSender(session, url, seed=0).send(MODEL, size)


def token(*ids: int) -> dict[str, Any]:
    return {"choices": [{"text": "x", "token_ids": list(ids)}]}


@pytest.mark.parametrize("size", [None, TextSize(9, 2)])
async def test_a_text_is_asked_for_with_drawn_tokens_and_its_length(size: TextSize | None) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        asked.append(body)
        return [token(7), token(8, 9), {"choices": [{"text": "", "finish_reason": "length"}]}, b"[DONE]"]

    times = await sent(answer, size)
    (body,) = asked
    expected = size or MODEL.size
    assert len(body["prompt"]) == expected.prompt_tokens
    assert all(3 <= token < 40 for token in body["prompt"])
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "stream")} == {
        "model": "chat",
        "max_tokens": expected.output_tokens,
        "temperature": 0,
        "stream": True,
    }
    assert len(times.gaps_s) == 2, "three tokens, two of them in one event"
    assert times.first_s > 0
    assert times.gaps_s[1] == 0


async def test_without_token_ids_an_event_is_a_token_but_for_the_one_that_ends_the_text() -> None:
    events: list[dict[str, Any] | bytes] = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]
    end: list[dict[str, Any] | bytes] = [{"choices": [{"finish_reason": "stop"}]}, {"choices": []}, b"[DONE]"]
    assert len((await sent(lambda body: [*events, *end])).gaps_s) == 1


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (503, "HTTP 503"),
        ([], "malformed answer"),
        ([b"[DONE]"], "malformed answer"),
        ([token(1), b"{nothing"], "malformed answer"),
        ([token(1), {"error": {"message": "the kernel caught fire"}}], "ended by an error"),
    ],
)
async def test_what_is_no_text_is_a_failure(events: Any, kind: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        await sent(lambda body: events)
    assert failed.value.kind == kind


async def test_a_server_that_is_gone_is_a_failure() -> None:
    async with completions(lambda body: []) as url:
        pass
    async with aiohttp.ClientSession() as session:
        with pytest.raises(RequestFailed, match="connection"):
            await TextSender(session, url, seed=0).send(MODEL, None)


async def test_a_text_has_the_lengths_that_its_arrival_names() -> None:
    lengths: list[int] = []

    def answer(body: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        lengths.append(len(body["prompt"]))
        return [token(1)]

    async with completions(answer) as url, connected(url, 4, 20.0) as client:
        send = sender(client, {"chat": MODEL}, Load(texts=(5, 3)))
        await send(RequestArrival(0.0, "chat"))
        await send(RequestArrival(0.0, "chat", TextSize(11, 2)))
    assert lengths == [5, 11]


async def test_texts_over_grpc_are_refused() -> None:
    async with connected("grpc://127.0.0.1:1", 4, 20.0) as client:
        with pytest.raises(UsageError, match="HTTP"):
            sender(client, {"chat": MODEL}, Load(texts=(5, 3)))


def test_a_report_counts_tokens_and_their_times_from_the_intended_send_time() -> None:
    run = RunDescription(url="u", seed=0, batch=1, rate_per_s=1, duration_s=10.0, warmup_s=1.0, slo_s=0.1)
    arrival = RequestArrival(2.0, "chat")
    outcomes = [
        Outcome(RequestArrival(0.5, "chat"), 0.0, 1.0, None, TokenTimes(9.0, (9.0,))),
        Outcome(arrival, 0.5, 2.0, None, TokenTimes(1.0, (0.1, 0.3))),
        Outcome(arrival, 0.0, 2.0, None, TokenTimes(2.0, ())),
        Outcome(arrival, 0.0, 2.0, RequestFailed("timeout", "")),
    ]
    generated = make_report(run, outcomes, ["chat"]).generated
    assert generated is not None
    assert (generated.texts, generated.tokens, generated.tokens_per_s) == (2, 4, 0.4)
    assert generated.first_token.mean_s == pytest.approx(1.75)
    assert generated.between_tokens is not None
    assert generated.between_tokens.max_s == 0.3
    assert make_report(run, outcomes[3:], ["chat"]).generated is None

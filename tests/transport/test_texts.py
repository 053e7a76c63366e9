"""Generated texts at the front end: steps, lost states, lack of memory, and clients that leave."""

import asyncio
import http.client
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.errors import ExecutionFailed, Overloaded, RequestError, SequenceLost
from cohabit.server.http.events import EventStream
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from tests.support.server.server_fakes import eventually
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import FakeModel, Gate, Ports, running, tensors

MIB = 1 << 20
VOCABULARY, MOST, CONTEXT = 50, 4, 40
PROMPT = [7, 3, 9, 8, 1, 2, 5, 4, 6, 10]


class Steps(Gate):
    """A language model that says the number after the last one. `errors` come instead of the answers to some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[int, RequestError] = {}
        """By step, counted from 0."""
        self.held_from: int | None = None
        """The step from which on the gate is closed."""
        self.on_step: dict[int, Callable[[], None]] = {}
        """Called before the answers to some steps."""
        self.sent: list[tuple[bool, list[int]]] = []
        """By step, whether it began a sequence, and its tokens."""
        dynamic = DynamicShape((Dimension("t", 0, 1, 1, 0, 1, MOST, (MOST,)),))
        inputs = (TensorSpec("input_ids", "INT64", (-1,), sizes=("t",)),)
        outputs = tensors(("logits", "FP32", (VOCABULARY,)))
        info = ModelInfo("lm", 1, inputs, outputs, 8, dynamic=dynamic, sequences=True, context=CONTEXT)
        self.model = FakeModel(info, self.answer, self)

    async def wait(self) -> None:
        if self.held_from is not None and len(self.model.requests) > self.held_from:
            await super().wait()

    def answer(self, input_ids: Array) -> dict[str, Array]:
        step = self.model.requests[-1].sequence
        assert step is not None
        self.sent.append((step.start, input_ids[0].tolist()))
        self.on_step.pop(len(self.model.requests) - 1, lambda: None)()
        if (error := self.errors.pop(len(self.model.requests) - 1, None)) is not None:
            raise error
        logits = np.zeros((1, VOCABULARY), np.float32)
        logits[0, (input_ids[0, -1] + 1) % VOCABULARY] = 1
        return {"logits": logits}


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def ports(steps: Steps, tmp_path: Path) -> Iterator[Ports]:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "generation.json").write_text('{"stop_ids": [0]}')
    with running(steps.model, repository=tmp_path) as served:
        yield served


def completion(ports: Ports, **more: Any) -> Any:
    body = {"model": "lm", "prompt": PROMPT, "temperature": 0, "max_tokens": 4, **more}
    return ask(ports, "POST", "/v1/completions", json.dumps(body).encode())


WHOLE = [(True, PROMPT[:4]), (False, PROMPT[4:8]), (False, PROMPT[8:])]
AFTER = [(False, [11]), (False, [12]), (False, [13])]


def test_a_prompt_goes_in_pieces_and_then_each_token(ports: Ports, steps: Steps) -> None:
    answer = completion(ports).json
    assert answer["choices"][0]["token_ids"] == [11, 12, 13, 14]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert steps.sent == [*WHOLE, *AFTER]
    names = {request.sequence.id for request in steps.model.requests if request.sequence is not None}
    assert [(steps.model.info.key, name) for name in names] == ports.engine.ended


def test_a_text_ends_at_the_model_s_own_token(ports: Ports) -> None:
    answer = completion(ports, prompt=[48], max_tokens=9).json
    assert answer["choices"][0]["token_ids"] == [49, 0]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("lost", [1, 3, 5])
def test_a_state_that_was_lost_is_computed_again_from_all_tokens(ports: Ports, steps: Steps, lost: int) -> None:
    steps.errors[lost] = SequenceLost("it is not known")
    assert completion(ports).json["choices"][0]["token_ids"] == [11, 12, 13, 14]
    before = [*WHOLE, *AFTER][: lost + 1]
    again = [*PROMPT, *(tokens[0] for _, tokens in AFTER[: max(lost - 2, 0)])]
    pieces = [(start == 0, again[start : start + MOST]) for start in range(0, len(again), MOST)]
    left = AFTER[max(lost - 2, 0) :]
    assert steps.sent == [*before, *pieces, *left]


def test_a_first_step_whose_sequence_is_not_known_is_an_error(ports: Ports, steps: Steps) -> None:
    steps.errors[0] = SequenceLost("it is not known")
    assert completion(ports).status == 400
    assert len(steps.sent) == 1


def test_a_text_that_has_begun_waits_for_memory(ports: Ports, steps: Steps) -> None:
    steps.errors = {step: Overloaded("no memory", retry_after_s=0.0) for step in (1, 2, 5)}
    assert completion(ports).json["choices"][0]["token_ids"] == [11, 12, 13, 14]
    assert steps.sent == [WHOLE[0], *WHOLE[1:2] * 3, WHOLE[2], *AFTER[:1] * 2, *AFTER[1:]]


def test_a_text_that_finds_no_memory_at_first_is_refused(ports: Ports, steps: Steps) -> None:
    steps.errors[0] = Overloaded("no memory", retry_after_s=0.0)
    assert completion(ports).status == 503


def test_what_fails_after_the_first_token_is_an_event(ports: Ports, steps: Steps) -> None:
    steps.errors[4] = ExecutionFailed("lm", "the kernel caught fire")
    answer = completion(ports, stream=True)
    assert answer.status == 200
    events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line]
    assert [event["choices"][0]["token_ids"] for event in events[:-1]] == [[11], [12]]
    assert "the kernel caught fire" in events[-1]["error"]["message"]


SEVERAL: list[list[int]] = [[7], [20, 21], [30] * 9]


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_of_one_request_have_the_texts_that_each_has_alone(ports: Ports, n: int) -> None:
    answer = completion(ports, prompt=SEVERAL, n=n).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * n))
    for choice in answer["choices"]:
        alone = completion(ports, prompt=SEVERAL[choice["index"] // n]).json["choices"][0]
        assert choice == alone | {"index": choice["index"]}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 12 * n, 12 + 12 * n)


def test_a_stream_of_several_texts_tells_them_apart_and_ends_each(ports: Ports) -> None:
    answer = completion(ports, prompt=SEVERAL, n=2, stream=True, stream_options={"include_usage": True})
    *lines, done = [line[6:] for line in answer.body.split(b"\n\n") if line]
    assert done == b"[DONE]"
    *events, counted = map(json.loads, lines)
    assert (counted["choices"], counted["usage"]["completion_tokens"]) == ([], 24)
    choices = [event["choices"][0] for event in events]
    for index in range(6):
        own = [choice for choice in choices if choice["index"] == index]
        last = SEVERAL[index // 2][-1]
        assert [token for choice in own for token in choice.get("token_ids", [])] == [last + n for n in range(1, 5)]
        assert [choice["finish_reason"] for choice in own] == [None] * 4 + ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_text_ends_all_of_its_request(ports: Ports, steps: Steps, stream: bool) -> None:
    steps.errors[7] = ExecutionFailed("lm", "the kernel caught fire")
    answer = completion(ports, prompt=[[7], [20], [30]], max_tokens=25, stream=stream)
    assert "the kernel caught fire" in answer.body.decode()
    assert answer.status == (200 if stream else 500)
    sent = len(steps.sent)
    assert completion(ports).status == 200
    assert len(steps.sent) == sent + len(WHOLE) + len(AFTER), "no step of the other texts came after"


def test_the_prompts_of_a_request_are_bounded(ports: Ports, steps: Steps) -> None:
    for more, said in (
        ({"prompt": [[7]] * 33}, "over 32 texts"),
        ({"prompt": ["a"] * 33}, "over 32 texts"),
        ({"prompt": [[7]] * 17, "n": 2}, "17 prompts and n=2 make 34 texts; a request has at most 32"),
        ({"prompt": [7] * (2 * CONTEXT)}, f"more token ids than the {CONTEXT}"),
        ({"prompt": [[7], 8]}, "token ids beside texts or lists"),
        ({"n": 33}, "n"),
        ({"n": 0}, "n"),
    ):
        answer = completion(ports, **more)
        assert (answer.status, said in answer.json["error"]["message"]) == (400, True), answer.json
    assert steps.sent == []


async def test_a_stream_that_nobody_reads_ends_with_its_connection_when_patience_ends() -> None:
    """It does not wait for what the client has not read to be sent."""
    ended = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x" * MIB
        finally:
            ended.set()

    async def stream(request: web.Request) -> web.StreamResponse:
        return EventStream(events(), b"first", patience_s=0.2)

    app = web.Application()
    app.router.add_get("/", stream)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            await ended.wait()
            while runner.server is not None and runner.server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        writer.close()
        await runner.cleanup()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_text(ports: Ports, steps: Steps, stream: bool) -> None:
    """The step after the first token is cancelled, and no other one follows."""
    steps.held_from = len(WHOLE)
    connection = http.client.HTTPConnection("127.0.0.1", ports.port, timeout=30)
    body = {"model": "lm", "prompt": PROMPT, "temperature": 0, "max_tokens": 25, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    assert steps.entered.acquire(timeout=30)
    connection.sock.close()
    connection.close()
    eventually(lambda: not ports.http._connections)
    assert steps.cancelled.acquire(timeout=30)
    ports.loop.call_soon_threadsafe(steps.open)
    eventually(lambda: len(ports.engine.ended) == 1)
    assert ports.plane._texts == 0
    assert steps.sent == WHOLE


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"temprature": 0.1}, "'temprature' is not a field of this request; did you mean 'temperature'?"),
        ({"min_p": 0.9}, "min_p is not supported"),
        ({"stop_token_ids": [5]}, "stop_token_ids is not supported"),
        ({"guided_grammar": "root ::= 'a'"}, "guided_grammar is not supported"),
        ({"response_format": {"type": "json_object"}}, "has no tokenizer, so that no text can follow a schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools is not supported"),
        ({"logit_bias": {"99999999": 5}}, "logit_bias has token id 99999999; those of model 'lm' are from 0 to"),
        (
            {"max_tokens": 50},
            "max_tokens is 50; model 'lm' takes 40 tokens, and the prompt has 10, so that at most 31",
        ),
        ({"stream_options": {"include_usge": True}}, "include_usge"),
        ({"stream_options": {"include_usage": True}}, "stream_options need 'stream': true"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(
    ports: Ports, steps: Steps, field: dict[str, Any], said: str
) -> None:
    answer = completion(ports, **field)
    assert (answer.status, said in answer.json["error"]["message"]) == (400, True), answer.json
    assert steps.sent == []


def test_fields_that_stand_for_what_an_absent_one_does_are_accepted(ports: Ports) -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "min_p": 0.0,
    }
    more = {
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "tools": None,
        "logit_bias": {},
        "stop": None,
    }
    more |= {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "guided_json": None}
    assert completion(ports, **neutral, **more).json["choices"][0]["token_ids"] == [11, 12, 13, 14]


def replaced(ports: Ports, archive: str) -> None:
    """Publish that another archive is served now. Event loop's thread."""
    entry = ports.engine.catalog.get("lm", 1)
    assert entry is not None
    ports.engine.catalog.update(msgspec.structs.replace(entry, archive=archive))


def test_a_text_never_goes_on_with_other_weights(ports: Ports, steps: Steps) -> None:
    steps.on_step[4] = lambda: replaced(ports, "other")
    answer = completion(ports, stream=True)
    events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line]
    assert "was replaced or unloaded while it generated this text" in events[-1]["error"]["message"]
    assert [event["choices"][0]["token_ids"] for event in events[:-1]] == [[11], [12]]
    names = {request.sequence.id for request in steps.model.requests if request.sequence is not None}
    assert [(steps.model.info.key, name) for name in names] == ports.engine.ended


def test_a_text_without_a_token_begins_again_with_the_new_weights(ports: Ports, steps: Steps) -> None:
    steps.on_step[1] = lambda: replaced(ports, "other")
    assert completion(ports).json["choices"][0]["token_ids"] == [11, 12, 13, 14]
    assert steps.sent == [*WHOLE[:2], *WHOLE, *AFTER]
    sequences = [request.sequence for request in steps.model.requests if request.sequence is not None]
    names = [sequence.id for sequence in sequences if sequence.start]
    assert [name for _, name in ports.engine.ended] == names


def test_a_state_that_was_lost_with_its_weights_is_not_computed_again(ports: Ports, steps: Steps) -> None:
    steps.on_step[4] = lambda: replaced(ports, "other")
    steps.errors[4] = SequenceLost("it is not known")
    answer = completion(ports)
    assert answer.status == 503
    assert "was replaced or unloaded" in answer.json["error"]["message"]


WORDS = [f"w{n}" for n in range(VOCABULARY)]


@pytest.fixture
def worded(steps: Steps, tmp_path: Path) -> Iterator[Ports]:
    """The same model with a tokenizer, by which token n is the word "wn"."""
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "generation.json").write_text('{"stop_ids": [0]}')
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "lm" / "tokenizer.json"))
    numbers = FakeModel(
        ModelInfo("numbers", 1, tensors(("x", "FP32", (1,))), tensors(("y", "FP32", (1,))), 8), lambda x: {"y": x}
    )
    with running(steps.model, numbers, repository=tmp_path) as served:
        yield served


def generated(ports: Ports, body: dict[str, Any], *, stream: bool = False, model: str = "lm") -> Any:
    path = f"/v2/models/{model}/versions/1/generate{'_stream' if stream else ''}"
    return ask(ports, "POST", path, json.dumps(body).encode())


@pytest.mark.parametrize(
    "sent",
    [
        {"max_tokens": 3, "temperature": 0},
        {"parameters": {"max_tokens": 3, "temperature": 0}},
        {"parameters": {"max_tokens": 9, "temperature": 0}, "max_tokens": 3},
        {"max_tokens": 9, "temperature": 0, "stop_words": ["w9"]},
        {"max_tokens": 9, "temperature": 0, "stop": "w9", "bad_words": "", "user": {"deep": [1]}},
    ],
)
def test_triton_s_generate_goes_on_from_a_text(worded: Ports, sent: dict[str, Any]) -> None:
    answer = generated(worded, {"text_input": "w4 w5", "id": "seven", **sent})
    is_cut = "stop" in sent or "stop_words" in sent
    assert answer.json == {
        "id": "seven",
        "model_name": "lm",
        "model_version": "1",
        "text_output": " w6 w7 w8" + (" " if is_cut else ""),
        "finish_reason": "stop" if is_cut else "length",
    }


def test_triton_s_stream_has_an_event_for_each_token_and_says_why_it_ends(worded: Ports) -> None:
    answer = generated(worded, {"text_input": "w46 w47", "temperature": 0, "max_tokens": 9}, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b"\n\n")
    events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line]
    assert [event["text_output"] for event in events] == [" w48", " w49", ""]
    assert [event.get("finish_reason") for event in events] == [None, None, "stop"]
    assert {event["model_name"] for event in events} == {"lm"}


def test_a_step_is_still_an_inference_with_plain_values(worded: Ports, steps: Steps) -> None:
    step = {"input_ids": [[4, 5]], "parameters": {"sequence_id": 7, "sequence_start": True}}
    answer = generated(worded, step)
    assert int(np.argmax(answer.json["logits"])) == 6
    assert steps.sent == [(True, [4, 5])]


def test_generate_refuses_to_stream(worded: Ports) -> None:
    answer = generated(worded, {"text_input": "w4 w5", "stream": True})
    assert (answer.status, "use generate_stream" in answer.json["error"]) == (400, True)


def test_a_model_of_tensors_still_answers_generate_with_tensors(worded: Ports) -> None:
    assert generated(worded, {"x": 2.5}, model="numbers").json["y"] == 2.5
    assert b'"y":2.5' in generated(worded, {"x": 2.5}, stream=True, model="numbers").body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "missing required field `text_input`"),
        ({"max_tokens": 3}, "missing required field `text_input`"),
        ({"text_input": 5}, "text_input"),
        ({"text_input": "w4", "parameters": 3}, "parse"),
        ({"text_input": "w4", "parameters": {"temperature": "hot"}}, "temperature"),
        ({"text_input": ""}, "no tokens"),
        ({"text_input": "w4", "bad_words": ["w9"]}, "bad_words is not supported"),
        ({"text_input": "w4", "stop_words": ["w"] * 5}, "4 strings"),
        ({"text_input": "w4 " * 40}, "40 tokens"),
    ],
)
def test_what_generate_cannot_go_on_from_is_refused_in_triton_s_form(
    worded: Ports, steps: Steps, body: dict[str, Any], said: str
) -> None:
    for stream in (False, True):
        answer = generated(worded, body, stream=stream)
        assert answer.status == 400
        assert said in answer.json["error"]
    assert steps.sent == []


def test_generate_without_a_tokenizer_says_so(ports: Ports) -> None:
    answer = generated(ports, {"text_input": "w4"})
    assert answer.status == 400
    assert "tokenizer" in answer.json["error"]

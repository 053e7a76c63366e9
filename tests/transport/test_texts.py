"""Generated texts at the front end: steps, lost states, lack of memory, and clients that leave."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_http import ask
from transport_fakes import FakeModel, Gate, Ports, running, tensors

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.errors import ExecutionFailed, Overloaded, RequestError, SequenceLost
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from tests.server.server_fakes import eventually

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

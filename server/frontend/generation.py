"""Text generation: a language model's next tokens, one step after the other.

A step is a request of a sequence like any other: the scheduler batches steps of different texts, and executes other
models' requests in between. The front end has the tokens, so that a text continues after the engine has lost its state.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, ModelNotFound, Overloaded, Refused, SequenceLost
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.model_files import ModelFiles
from cohabit.server.frontend.threads import call
from cohabit.server.frontend.tokenizers import LoadedTokenizer
from cohabit.server.ipc.model import GENERATION, Array, LanguageDocument, ModelInfo
from cohabit.server.ipc.request import Parameters, RequestedOutput
from cohabit.server.protocol.datatypes import DTYPES
from cohabit.server.protocol.decoding import Sampler, StopStrings, log_probabilities
from cohabit.server.protocol.matching import InputBody, RequestBody, fit

_TOKENS, _LOGITS = "input_ids", "logits"
_MOST_BYTES = 4 << 20
_PATIENCE_S = 30.0
"""Seconds that a started text waits for memory."""
_QUICK_VOCABULARY = 32 << 10
"""Largest vocabulary whose tokens are sampled on the event loop. Greedy sampling takes microseconds for all."""


_document = msgspec.json.Decoder(LanguageDocument)


class LanguageDocuments:
    """By model. Belongs to the event loop's thread; files are read on others."""

    def __init__(self, repository: Path) -> None:
        self._files = ModelFiles(
            repository, GENERATION, _MOST_BYTES, lambda path: _document.decode(path.read_bytes())
        )

    async def of(self, info: ModelInfo) -> LanguageDocument:
        """Return the current content of a model's file. Raises InvalidRequest for a model that generates no text."""
        found = await self._files.of(info.name)
        if found is None or not generates(info):
            raise InvalidRequest(
                f"model '{info.name}' generates no text: it has no {GENERATION}, which `cohabit import` writes for"
                " causal language models"
            )
        return found


def generates(info: ModelInfo) -> bool:
    """Whether a model takes the next tokens of a sequence, and answers with the logits of the following token."""
    tokens, logits = (
        [(tensor.name, len(info.wire_shape(tensor))) for tensor in tensors]
        for tensors in (info.inputs, info.outputs)
    )
    return info.context > 0 and tokens == [(_TOKENS, 2)] and logits == [(_LOGITS, 2)]


@dataclass(slots=True)
class TokenSequence:
    """The tokens of one text, and the number of them that the engine has."""

    plane: DataPlane
    info: ModelInfo
    tokens: list[int]
    prompt_length: int
    done: int = 0
    name: str = ""
    """Name of the engine's sequence; empty before the first step."""
    _archive: str | None = None
    """Fingerprint of the archive whose weights compute the text; None before the first step."""

    async def logits(self) -> Array:
        """Return the logits of the next token [vocabulary], float32.

        Requires tokens that the engine does not have yet. Raises RequestError, also if other weights have replaced
        those that the text began with.
        """
        answer: Array | None = None
        while self.done < len(self.tokens):
            piece = self.tokens[self.done : self.done + self._most]
            done = self.done + len(piece)
            try:
                answer = await self._step_with_retries(piece, start=self.done == 0)
            except SequenceLost:
                if self.done == 0:
                    raise
                done = 0  # the engine has restarted, and needs the whole text again
            except ModelNotFound:
                if not self._is_replaced:
                    raise
            if self._is_replaced:
                self._begin_again()
                done = 0
            self.done = done
        assert answer is not None
        return answer

    @property
    def _is_replaced(self) -> bool:
        """Whether other weights have replaced those of the steps so far, or the version was unloaded.

        The catalog is updated before a new load answers.
        """
        return self._archive is not None and self.plane.archive_of(self.info.key) != self._archive

    def _begin_again(self) -> None:
        """Forget the steps of replaced weights. Raises Refused if the client may have tokens of these."""
        if len(self.tokens) > self.prompt_length:
            raise Refused(
                "ModelNotReady",
                f"version {self.info.version} of model '{self.info.name}' was replaced or unloaded while it generated"
                " this text, which ends here; send it again",
            )
        self.close()
        self._archive = None

    async def _step_with_retries(self, piece: Sequence[int], start: bool) -> Array:
        """Run a step; a started text waits while the server is overloaded."""
        deadline_s = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                return await self._step(piece, start)
            except Overloaded as error:
                if start or asyncio.get_running_loop().time() + error.retry_after_s > deadline_s:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _step(self, piece: Sequence[int], start: bool) -> Array:
        plane = self.plane
        if self._archive is None:
            # A version that was replaced since the request arrived has a successor.
            if plane.archive_of(self.info.key) is None:
                self.info = plane.successor(self.info) or self.info
            self._archive = plane.archive_of(self.info.key)
        info = self.info
        if start:
            self.name = f"text-{uuid.uuid4().hex}"
        sequence: Parameters = {"sequence_id": self.name, "sequence_start": start}
        body = InputBody(_TOKENS, info.inputs[0].datatype, [1, len(piece)])
        message = RequestBody(
            [body], outputs=[RequestedOutput(_LOGITS, {"binary_data": True})], parameters=sequence
        )

        def read(_: InputBody[list[int]]) -> Array:
            return np.array([piece], DTYPES[info.inputs[0].datatype])

        with plane.memory.lease() as lease, plane.regions.use() as regions:
            answer = await plane.infer(
                fit(message, info, regions, read, binary=True), info, lease, str(info.version)
            )
            logits: Array = answer.outputs[_LOGITS][0].astype(np.float32)
            return logits

    @property
    def _most(self) -> int:
        """Maximum number of tokens of one step."""
        return self.info.dynamic.dimensions[0].buckets[-1]

    def close(self) -> None:
        """Make the engine forget the text."""
        if self.name:
            self.plane.end_sequence(self.info.key, self.name)


@dataclass(slots=True)
class Text:
    """A text to generate, and its progress."""

    info: ModelInfo
    tokenizer: LoadedTokenizer | None
    prompt: list[int]
    sampler: Sampler
    stops: Sequence[str]
    stop_ids: Sequence[int]
    cleans_up_spaces: bool
    most: int
    """Maximum number of generated tokens."""
    likely: int | None
    """Number of alternatives to report per token, with log probabilities; None reports none."""
    generated: int = 0
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def usage(self) -> dict[str, int]:
        count = len(self.prompt)
        return {"prompt_tokens": count, "completion_tokens": self.generated, "total_tokens": count + self.generated}


@dataclass(frozen=True, slots=True)
class TextPiece:
    """One generated token, and the text that can be sent after it."""

    text: str
    token: int
    log_probabilities: tuple[float, list[tuple[int, float]]] | None = None
    """The token's own, and those of the most likely tokens."""


async def generate(plane: DataPlane, text: Text) -> AsyncGenerator[TextPiece, None]:
    """Generate a text token by token. Closing or cancelling the generator ends the text. Raises RequestError."""
    info, sampler, stops, tokenizer = text.info, text.sampler, StopStrings(text.stops), text.tokenizer
    decoder = None if tokenizer is None else tokenizer.decoder(text.prompt, cleans_up=text.cleans_up_spaces)
    sequence = TokenSequence(plane, info, list(text.prompt), len(text.prompt))
    slow = info.outputs[0].shape[-1] > _QUICK_VOCABULARY
    started_s = time.monotonic()
    with plane.generating(), closing(sequence):
        while text.finish_reason is None:
            logits = await sequence.logits()
            token = await call(slow and not sampler.is_greedy, sampler.choose, logits)
            now_s = time.monotonic()
            plane.generated(info.key, now_s - started_s, first=not text.generated)
            started_s = now_s
            text.generated += 1
            is_end, piece = token in text.stop_ids, ""
            if decoder is not None and tokenizer is not None:
                # A special token is no text, but may be a stop string, or a part of one.
                piece = stops.push(tokenizer.special(token), hidden=True)
                piece += "" if is_end else stops.push(decoder.push(token))
            if is_end or stops.found:
                text.finish_reason = "stop"
            elif text.generated >= text.most:
                text.finish_reason = "length"
            if text.finish_reason is not None and decoder is not None and not stops.found:
                piece += stops.push(decoder.flush())
                text.finish_reason = "stop" if stops.found else text.finish_reason
                piece += stops.flush()
            likely = None
            if text.likely is not None:
                likely = await call(slow, log_probabilities, logits, token, text.likely)
            yield TextPiece(piece, token, likely)
            sequence.tokens.append(token)

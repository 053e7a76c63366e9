"""Text generation: a language model's next tokens, one step after the other.

A step is a request of a sequence like any other: the scheduler batches steps of different texts, and executes other
models' requests in between. The front end has the tokens, so that a text continues after the engine has lost its state.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from cohabit.server.errors import InvalidRequest, ModelNotFound, Overloaded, Refused, SequenceLost
from cohabit.server.frontend.constraints import Grammar
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.model_files import ModelFiles
from cohabit.server.frontend.threads import call
from cohabit.server.frontend.tokenizers import LoadedTokenizer
from cohabit.server.ipc.model import GENERATION, Array, LanguageDocument, ModelInfo
from cohabit.server.ipc.request import Parameters, RequestedOutput, SequenceStep
from cohabit.server.protocol.datatypes import DTYPES
from cohabit.server.protocol.decoding import Sampler, StopStrings, log_probabilities
from cohabit.server.protocol.matching import InputBody, RequestBody, fit

_TOKENS, _LOGITS = "input_ids", "logits"
_MOST_BYTES = 4 << 20
_LEAST_REUSED = 16
"""Tokens in common for which the keys and values of another text are copied."""
_MOST_ENDED = 64
"""Ended texts of a model that are kept. The engine forgets them earlier if it needs their memory."""
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


@dataclass(slots=True, eq=False)
class TokenSequence:
    """The tokens of one text, and the number of them that the engine has."""

    plane: DataPlane
    info: ModelInfo
    tokens: list[int]
    prompt_length: int
    prefixes: "Prefixes"
    done: int = 0
    reused: int = 0
    """Number of tokens that another text had computed."""
    name: str = ""
    """Name of the engine's sequence; empty before the first step."""
    archive: str | None = None
    """Fingerprint of the archive whose weights compute the text; None before the first step."""
    _is_begun: bool = False
    """Whether the engine has the first `done` tokens."""
    _is_alone: bool = False
    """Whether it begins without a prefix."""

    async def logits(self) -> Array:
        """Return the logits of the next token [vocabulary], float32.

        Requires tokens that the engine does not have yet. Raises RequestError, also if other weights have replaced
        those that the text began with.
        """
        answer: Array | None = None
        while self.done < len(self.tokens):
            prefix = None if self._is_begun else self._prefix()
            done = self.done if prefix is None else prefix.length
            piece = self.tokens[done : done + self._most]
            try:
                answer = await self._step_with_retries(piece, prefix)
                if not self._is_begun:
                    self.reused, self._is_begun = done, True
                    self.prefixes.begin(self, prefix)
                self.done = done + len(piece)
            except SequenceLost:
                # The engine has restarted, or does not have the prefix: it gets the whole text.
                if prefix is not None:
                    self.prefixes.lost(prefix.text)
                elif self._is_begun:
                    self.prefixes.forget(self)
                else:
                    raise
                self.done, self._is_begun, self._is_alone = 0, False, True
            except ModelNotFound:
                if not self._is_replaced:
                    raise
            if self._is_replaced:
                self._begin_again()
        assert answer is not None
        return answer

    def _prefix(self) -> "Prefix | None":
        if self.archive is None:
            # A version that was replaced since the request arrived has a successor.
            if self.plane.archive_of(self.info.key) is None:
                self.info = self.plane.successor(self.info) or self.info
            self.archive = self.plane.archive_of(self.info.key)
        return None if self._is_alone else self.prefixes.longest(self)

    @property
    def _is_replaced(self) -> bool:
        """Whether other weights have replaced those of the steps so far, or the version was unloaded.

        The catalog is updated before a new load answers.
        """
        return self.archive is not None and self.plane.archive_of(self.info.key) != self.archive

    def _begin_again(self) -> None:
        """Forget the steps of replaced weights. Raises Refused if the client may have tokens of these."""
        if len(self.tokens) > self.prompt_length:
            raise Refused(
                "ModelNotReady",
                f"version {self.info.version} of model '{self.info.name}' was replaced or unloaded while it generated"
                " this text, which ends here; send it again",
            )
        self.prefixes.forget(self)
        self.archive, self.done, self._is_begun = None, 0, False

    async def _step_with_retries(self, piece: Sequence[int], prefix: "Prefix | None") -> Array:
        """Run a step; a begun text waits while the server is overloaded."""
        deadline_s = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                return await self._step(piece, prefix)
            except Overloaded as error:
                if not self._is_begun or asyncio.get_running_loop().time() + error.retry_after_s > deadline_s:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _step(self, piece: Sequence[int], prefix: "Prefix | None") -> Array:
        plane, info = self.plane, self.info
        if not self._is_begun:
            self.name = f"text-{uuid.uuid4().hex}"
        sequence: Parameters = {"sequence_id": self.name, "sequence_start": not self._is_begun}
        body = InputBody(_TOKENS, info.inputs[0].datatype, [1, len(piece)])
        message = RequestBody(
            [body], outputs=[RequestedOutput(_LOGITS, {"binary_data": True})], parameters=sequence
        )

        def read(_: InputBody[list[int]]) -> Array:
            return np.array([piece], DTYPES[info.inputs[0].datatype])

        with plane.memory.lease() as lease, plane.regions.use() as regions:
            request = fit(message, info, regions, read, binary=True)
            if prefix is not None:
                begins = SequenceStep(self.name, start=True, prefix=(prefix.text.name, prefix.length))
                request = replace(request, sequence=begins)
            answer = await plane.infer(request, info, lease, str(info.version))
            logits: Array = answer.outputs[_LOGITS][0].astype(np.float32)
            return logits

    @property
    def _most(self) -> int:
        """Maximum number of tokens of one step."""
        return self.info.dynamic.dimensions[0].buckets[-1]

    def close(self) -> None:
        """End the text. The engine keeps it as long as it has the memory, for texts that begin as it does."""
        self.prefixes.end(self)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a text has in common with another one, which the engine has."""

    text: TokenSequence
    length: int


class Prefixes:
    """Texts whose keys and values the engine has, so that others continue from what they have in common.

    Texts under way, and the last `_MOST_ENDED` of each model that have ended. The next turn of a conversation begins
    with all of the one before. Event loop's thread only.
    """

    def __init__(self) -> None:
        self._texts: dict[str, TokenSequence] = {}
        """By name."""
        self._ended: dict[str, None] = {}
        """Those that have ended, the least recently used first."""

    def longest(self, text: TokenSequence) -> Prefix | None:
        """Return the longest beginning, except for the last token, that another text of the same weights has."""
        wanted = text.tokens[:-1]
        best: Prefix | None = None
        for other in self._texts.values():
            if (other.info.key, other.archive) != (text.info.key, text.archive):
                continue
            # Only a text that has the next token, too, is better: most of many are dismissed by it.
            at = _LEAST_REUSED - 1 if best is None else best.length
            most = min(other.done, len(wanted))
            if at < most and other.tokens[at] == wanted[at]:
                length = _common(other.tokens, wanted, most)
                if length > at:
                    best = Prefix(other, length)
        return best

    def begin(self, text: TokenSequence, prefix: Prefix | None) -> None:
        """The engine has the first tokens of a text, which began with a prefix."""
        self._texts[text.name] = text
        if prefix is not None and prefix.text.name in self._ended:
            self._ended[prefix.text.name] = self._ended.pop(prefix.text.name)

    def lost(self, text: TokenSequence) -> None:
        """The engine does not have the beginning of a text. One that is under way will learn of it."""
        if text.name in self._ended:
            self.forget(text)

    def end(self, text: TokenSequence) -> None:
        """A text has ended. The engine keeps it, and forgets those that it continues, and the least recently used."""
        is_known = text.name in self._texts
        if text.name:
            text.plane.end_sequence(text.info.key, text.name, spare=is_known)
        if not is_known:
            return
        ended = [self._texts[name] for name in self._ended if self._texts[name].info.key == text.info.key]
        continued = [other for other in ended if other.tokens[: other.done] == text.tokens[: other.done]]
        others = [other for other in ended if other not in continued]
        self._ended[text.name] = None
        for other in (*continued, *others[: max(len(others) + 1 - _MOST_ENDED, 0)]):
            self.forget(other)

    def forget(self, text: TokenSequence) -> None:
        """Make the engine forget a text."""
        self._ended.pop(text.name, None)
        if self._texts.pop(text.name, None) is not None:
            text.plane.end_sequence(text.info.key, text.name)


def _common(some: Sequence[int], others: Sequence[int], most: int) -> int:
    """Return the number of first tokens that two texts have in common, up to `most`."""
    if some[:most] == others[:most]:
        return most
    return next(n for n in range(most) if some[n] != others[n])


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
    grammar: Grammar | None = None
    shows_special: bool = False
    """Whether the text includes special tokens. Some models write calls of tools with them."""
    generated: int = 0
    reused: int = 0
    """Number of the prompt's tokens that another text had computed."""
    finish_reason: Literal["stop", "length"] | None = None

    @property
    def usage(self) -> dict[str, Any]:
        count = len(self.prompt)
        return {
            "prompt_tokens": count,
            "completion_tokens": self.generated,
            "total_tokens": count + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }


@dataclass(frozen=True, slots=True)
class TextPiece:
    """One generated token, and the text that can be sent after it."""

    text: str
    token: int
    log_probabilities: tuple[float, list[tuple[int, float]]] | None = None
    """The token's own, and those of the most likely tokens."""


async def generate(plane: DataPlane, text: Text, prefixes: Prefixes) -> AsyncGenerator[TextPiece, None]:
    """Generate a text token by token. Closing or cancelling the generator ends the text. Raises RequestError."""
    info, sampler, stops, tokenizer = text.info, text.sampler, StopStrings(text.stops), text.tokenizer
    decoder = None if tokenizer is None else tokenizer.decoder(text.prompt, cleans_up=text.cleans_up_spaces)
    sequence = TokenSequence(plane, info, list(text.prompt), len(text.prompt), prefixes)
    slow = info.outputs[0].shape[-1] > _QUICK_VOCABULARY
    following = nullcontext() if text.grammar is None else plane.constraints.following(text.grammar)
    started_s = time.monotonic()
    with plane.generating(), closing(sequence):
        async with following as constraint:
            while text.finish_reason is None:
                logits = await sequence.logits()
                text.reused = sequence.reused
                allowed = None if constraint is None else constraint.allowed
                token = await call(slow and not sampler.is_greedy, sampler.choose, logits, allowed)
                now_s = time.monotonic()
                plane.generated(info.key, now_s - started_s, first=not text.generated)
                started_s = now_s
                text.generated += 1
                is_end, piece = token in text.stop_ids, ""
                if constraint is not None and not is_end:
                    await constraint.push(token)
                if decoder is not None and tokenizer is not None:
                    # A special token is no text, but may be a stop string, or a part of one.
                    piece = stops.push(tokenizer.special(token), hidden=is_end or not text.shows_special)
                    piece += "" if is_end else stops.push(decoder.push(token))
                if is_end or stops.found or (constraint is not None and constraint.is_complete):
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

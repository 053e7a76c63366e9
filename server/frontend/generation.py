"""Generation: a language model's next tokens, one step after the other.

A step is a request of a sequence like any other: the scheduler batches those of different texts, and executes other
models' requests in between. The front end has the tokens, so that a text goes on where the engine has lost its state.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, Overloaded, Refused, SequenceLost
from cohabit.server.file_state import FileState
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.threads import call
from cohabit.server.ipc.model import GENERATION, Array, ModelInfo
from cohabit.server.ipc.request import Parameters, RequestedOutput
from cohabit.server.protocol.datatypes import DTYPES
from cohabit.server.protocol.matching import InputBody, RequestBody, fit

_TOKENS, _LOGITS = "input_ids", "logits"
_MOST_BYTES = 4 << 20
_PATIENCE_S = 30.0
"""How long a text that has begun waits for room."""


class LanguageDocument(msgspec.Struct, frozen=True):
    """What `generation.json` says of a language model's texts."""

    stop_ids: tuple[int, ...] = ()
    """Tokens at which a text ends."""
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = {}
    """What a chat template may name: `bos_token` and others."""


_document = msgspec.json.Decoder(LanguageDocument)


class LanguageDocuments:
    """By model. Belongs to the event loop's thread; files are read on others."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._read: dict[str, tuple[FileState, LanguageDocument]] = {}

    def state(self, model: str) -> FileState | None:
        """Return the state of a model's file; None if it has none. Reads the disk."""
        path = self._repository / model / GENERATION
        inside = path.is_file() and path.resolve().is_relative_to(self._repository.resolve())
        return FileState.of(path) if inside else None

    async def of(self, info: ModelInfo) -> LanguageDocument:
        """Return what a model's file says now. Raises InvalidRequest for a model that generates no text."""
        state = await call(True, self.state, info.name)
        if state is None or not generates(info):
            self._read.pop(info.name, None)
            raise InvalidRequest(
                f"model '{info.name}' generates no text: it has no {GENERATION}, which `cohabit import` writes for"
                " causal language models"
            )
        known = self._read.get(info.name)
        if known is None or known[0] != state:
            known = self._read[info.name] = state, await call(True, self._parsed, info.name, state)
        return known[1]

    def _parsed(self, model: str, state: FileState) -> LanguageDocument:
        if state.nbytes > _MOST_BYTES:
            text = f"model '{model}': its {GENERATION} has {state.nbytes} bytes, the limit is {_MOST_BYTES}"
            raise Refused("Unsupported", text)
        try:
            raw = (self._repository / model / GENERATION).read_bytes()
            return _document.decode(raw)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused("Unsupported", f"model '{model}': its {GENERATION} cannot be read: {error}") from error


def generates(info: ModelInfo) -> bool:
    """Whether a model takes the next tokens of a sequence, and answers with the logits of the one after them."""
    tokens, logits = (
        [(tensor.name, len(tensor.shape)) for tensor in tensors] for tensors in (info.inputs, info.outputs)
    )
    return info.context > 0 and tokens == [(_TOKENS, 1)] and logits == [(_LOGITS, 1)]


@dataclass(slots=True)
class TokenSequence:
    """The tokens of one text, and how many of them the engine has."""

    plane: DataPlane
    info: ModelInfo
    tokens: list[int]
    done: int = 0
    name: str = ""
    """Of its sequence in the engine; empty before the first step."""

    async def logits(self) -> Array:
        """Return the logits of the token after those that are there [vocabulary], float32.

        There must be tokens that the engine does not have. Raises RequestError.
        """
        answer: Array | None = None
        while self.done < len(self.tokens):
            piece = self.tokens[self.done : self.done + self._most]
            try:
                answer = await self._patiently(piece, start=self.done == 0)
            except SequenceLost:
                if self.done == 0:
                    raise
                self.done = 0  # the engine has started again, and gets all of the text again
            else:
                self.done += len(piece)
        assert answer is not None
        return answer

    async def _patiently(self, piece: Sequence[int], start: bool) -> Array:
        """Take a step; a text that has begun waits where there is no room."""
        deadline_s = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                return await self._step(piece, start)
            except Overloaded as error:
                if start or asyncio.get_running_loop().time() + error.retry_after_s > deadline_s:
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _step(self, piece: Sequence[int], start: bool) -> Array:
        plane, info = self.plane, self.info
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
            answer = await plane.infer(fit(message, info, regions, read, binary=True), info, lease)
            logits: Array = answer.outputs[_LOGITS][0].astype(np.float32)
            return logits

    @property
    def _most(self) -> int:
        """Tokens of one step."""
        return self.info.dynamic.dimensions[0].buckets[-1]

    def close(self) -> None:
        """Have the engine forget the text."""
        if self.name:
            self.plane.end_sequence(self.info.key, self.name)

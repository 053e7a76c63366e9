"""Text generation, whole or as server-sent events: OpenAI's completions and chats, and Triton's generate."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, structs

from cohabit.server.errors import InvalidRequest, Refused, RequestError
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.generation import (
    LanguageDocuments,
    Prefixes,
    Text,
    TextPiece,
    generate,
)
from cohabit.server.frontend.templates import REASONING, ChatTemplates
from cohabit.server.frontend.tokenizers import LoadedTokenizer
from cohabit.server.http.answers import json_response
from cohabit.server.http.body import read_body
from cohabit.server.http.errors import error_of
from cohabit.server.http.events import EventStream
from cohabit.server.http.text_fields import refuse_unsupported
from cohabit.server.ipc.model import LanguageDocument, ModelInfo
from cohabit.server.log import log_internal_error
from cohabit.server.protocol.decoding import Sampler, Sampling
from cohabit.server.protocol.json_body import parse_json

_log = logging.getLogger("cohabit.frontend")

MOST_TEXT_BYTES = 1 << 20
"""Maximum size of a body with a text to continue."""
_QUICK_BODY_BYTES = 2 << 10
_CHARACTERS_PER_TOKEN = 64
"""Maximum characters of a prompt per context token: longer prompts are refused untokenized."""
_USUAL_TOKENS = 16
"""OpenAI's `max_tokens` default for completions; chats may fill the context."""
_MOST_STOPS, _MOST_STOP_CHARACTERS = 4, 256
_WRITE_S = 30.0
"""Seconds until a client that reads no event is disconnected, so that its text keeps no memory."""

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Stops = str | list[str] | None


_IGNORED_OF_MESSAGES = frozenset({"role", "content", "name", "refusal", "annotations", "tool_call_id", *REASONING})
"""Fields of messages that a chat template may leave out."""
_MOST_LISTS = 1 << 17
"""Maximum number of lists and objects in a body, which is also refused for as many brackets in its texts."""

Message = dict[str, Any]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """OpenAI's padding of events against observers. Has no effect."""


class _Asked(msgspec.Struct, kw_only=True):
    """Fields of all endpoints. As in OpenAI's API, `null` means absent."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """Not OpenAI's: samples from this many most likely tokens; 0 and -1 from all."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    """Not OpenAI's: ignores end tokens, for benchmarks."""
    return_token_ids: bool | None = None
    """Not OpenAI's: returns the token ids of each piece of text."""

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens to generate, if given."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS or any(not 0 < len(stop) <= _MOST_STOP_CHARACTERS for stop in stops):
            raise InvalidRequest(
                f"stop: there can be {_MOST_STOPS} strings of 1 to {_MOST_STOP_CHARACTERS} characters"
            )
        return stops

    def sampler(self) -> Sampler:
        if self.n not in (None, 1):
            raise InvalidRequest(
                f"n is {self.n}; one text is generated per request: send the request {self.n} times"
            )
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError as error:
            raise InvalidRequest("logit_bias: keys are token ids") from error
        if any(token < 0 for token in bias):
            raise InvalidRequest("logit_bias: keys are token ids")
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=bias,
        )
        return Sampler(sampling)


class CompletionBody(_Asked, kw_only=True):
    prompt: msgspec.Raw
    """A text, token ids, or a list with one of these."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


_A = TypeVar("_A", bound=_Asked)


class ChatBody(_Asked, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class GenerateBody(_Asked, kw_only=True):
    """Fields of Triton's language model backends, at top level or in `parameters`."""

    model: str = ""
    """Named by the path."""
    text_input: str
    id: str = ""
    stop_words: Stops = None

    @property
    def stops(self) -> list[str]:
        given = structs.replace(self, stop=self.stop_words) if self.stop_words else self
        return super(GenerateBody, given).stops


class _Form(Protocol):
    """Formats generated text for one endpoint."""

    @property
    def path(self) -> str:
        """Path prefix that selects the error format."""
        ...

    def start(self) -> dict[str, Any] | None:
        """The first event of a stream, before any piece."""
        ...

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        """Event of a piece; None if empty: an incomplete character, and token ids not requested."""
        ...

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        """Yield the events after the last piece, with usage if requested."""
        ...

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]: ...


class CompletionsApi:
    """Every public method handles one endpoint, on the event loop's thread."""

    def __init__(self, plane: DataPlane, max_body_bytes: int) -> None:
        self._plane = plane
        self._documents = LanguageDocuments(plane.repository)
        self._prefixes = Prefixes()
        self._templates = ChatTemplates()
        self._most_body_bytes = min(max_body_bytes, MOST_TEXT_BYTES)

    async def generate(
        self, asked: GenerateBody, sampler: Sampler, info: ModelInfo, *, streams: bool
    ) -> web.StreamResponse:
        """Continue a text, for Triton's generate extension."""
        with self._plane.fitting(info.key):
            document = await self._documents.of(info)
            tokenizer = await self._plane.tokenizers.of(info.name)
            prompt = await self._tokens(asked.text_input, info, tokenizer, adds_special=True)
            text = self._text(asked, sampler, info, tokenizer, prompt, document, None)
        return await self._answer(asked, text, _Generated(text, asked.id), streams=streams)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete a prompt."""
        async with self._read(request, CompletionBody, "send a shorter prompt") as read:
            asked, sampler, info, document = read
            tokenizer = await self._plane.tokenizers.find(info.name)
            prompt = await self._prompt(asked.prompt, info, tokenizer)
            text = self._text(asked, sampler, info, tokenizer, prompt, document, asked.logprobs)
        return await self._answer(asked, text, _Completion(text, _named(asked, text)), streams=bool(asked.stream))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer the last message of a conversation."""
        async with self._read(request, ChatBody, "send a shorter conversation") as read:
            asked, sampler, info, document = read
            if asked.top_logprobs and not asked.logprobs:
                raise InvalidRequest(f"top_logprobs is {asked.top_logprobs} without logprobs; set logprobs to true")
            tokenizer = await self._plane.tokenizers.of(info.name)
            conversation = [_plain(message) for message in asked.messages]
            _refuse_unread(conversation, document)
            prompt_text = await self._templates.rendered(info.name, document, conversation)
            prompt = await self._tokens(prompt_text, info, tokenizer, adds_special=False)
            likely = (asked.top_logprobs or 0) if asked.logprobs else None
            text = self._text(asked, sampler, info, tokenizer, prompt, document, likely)
        return await self._answer(asked, text, _Chat(text, _named(asked, text)), streams=bool(asked.stream))

    @asynccontextmanager
    async def _read(
        self, request: web.Request, of_type: type[_A], way_out: str
    ) -> AsyncIterator[tuple[_A, Sampler, ModelInfo, LanguageDocument]]:
        """Read a body into memory leased for this block, and find its model. Counts mismatched requests."""
        plane = self._plane
        with plane.memory.lease() as lease:
            body = await read_body(request, lease, self._most_body_bytes, way_out)
            asked, sampler = await plane.decode(len(body) > _QUICK_BODY_BYTES, _parsed, body, of_type)
            info = plane.require_ready(asked.model)
            with plane.fitting(info.key):
                yield asked, sampler, info, await self._documents.of(info)

    async def _prompt(self, given: msgspec.Raw, info: ModelInfo, tokenizer: LoadedTokenizer | None) -> list[int]:
        slow = len(memoryview(given)) > _QUICK_BODY_BYTES
        parsed = await self._plane.decode(slow, _parsed_prompt, given, info)
        if isinstance(parsed, list):
            return parsed
        if tokenizer is None:
            raise InvalidRequest(f"model '{info.name}' has no tokenizer; send the prompt as token ids")
        return await self._tokens(parsed, info, tokenizer, adds_special=True)

    async def _tokens(
        self, text: str, info: ModelInfo, tokenizer: LoadedTokenizer, *, adds_special: bool
    ) -> list[int]:
        most = _CHARACTERS_PER_TOKEN * info.context
        if len(text) > most:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters; model '{info.name}', with {info.context} tokens, takes at most"
                f" {most}; send a shorter one"
            )
        slow = len(text) > _QUICK_BODY_BYTES
        (tokens,) = await self._plane.decode(slow, tokenizer.tokens, [text], adds_special=adds_special)
        return [int(token) for token in tokens]

    def _text(
        self,
        asked: _Asked,
        sampler: Sampler,
        info: ModelInfo,
        tokenizer: LoadedTokenizer | None,
        prompt: list[int],
        document: LanguageDocument,
        likely: int | None,
    ) -> Text:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens")
        vocabulary = info.outputs[0].shape[-1]
        if max(prompt) >= vocabulary or min(prompt) < 0:
            raise InvalidRequest(f"the prompt has a token id that is not from 0 to {vocabulary - 1}")
        if len(prompt) >= info.context:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, and model '{info.name}' takes {info.context} with what it"
                " generates; send a shorter one"
            )
        stops = asked.stops
        if stops and tokenizer is None:
            raise InvalidRequest(f"model '{info.name}' has no tokenizer, so that no text can have a stop string")
        if sampler.largest_biased >= vocabulary:
            raise InvalidRequest(
                f"logit_bias has token id {sampler.largest_biased}; those of model '{info.name}' are from 0 to"
                f" {vocabulary - 1}"
            )
        # The last generated token is not an input of another step.
        left = info.context - len(prompt) + 1
        most = asked.most_tokens
        if most is not None and most > left:
            raise InvalidRequest(
                f"max_tokens is {most}; model '{info.name}' takes {info.context} tokens, and the prompt has"
                f" {len(prompt)}, so that at most {left} can be generated; ask for fewer, or leave max_tokens out"
            )
        usual = left if isinstance(asked, ChatBody) else min(_USUAL_TOKENS, left)
        return Text(
            info,
            tokenizer,
            prompt,
            sampler,
            stops,
            stop_ids=() if asked.ignore_eos else document.stop_ids,
            cleans_up_spaces=document.cleans_up_spaces,
            most=usual if most is None else most,
            likely=likely,
        )

    async def _answer(self, asked: _Asked, text: Text, form: _Form, *, streams: bool) -> web.StreamResponse:
        pieces = generate(self._plane, text, self._prefixes)
        if not streams:
            async with aclosing(pieces):
                found = [piece async for piece in pieces]
            return json_response(form.whole(found))
        includes_usage = asked.stream_options is not None and asked.stream_options.include_usage
        events = _events(pieces, text, form, includes_usage=includes_usage)
        return EventStream(events, await anext(events), _WRITE_S)


async def _events(
    pieces: AsyncGenerator[TextPiece, None], text: Text, form: _Form, *, includes_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. Raises errors before the first piece; later errors become events."""
    async with aclosing(pieces):
        first = await anext(pieces, None)
        if (start := form.start()) is not None:
            yield msgspec.json.encode(start)
        try:
            if first is not None and (event := form.chunk(first)) is not None:
                yield msgspec.json.encode(event)
            async for piece in pieces:
                if (event := form.chunk(piece)) is not None:
                    yield msgspec.json.encode(event)
        except RequestError as error:
            yield msgspec.json.encode({"error": error_of(error, form.path)})
            return
        except Exception:
            internal = Refused("EngineFailed", log_internal_error(_log, path=form.path))
            yield msgspec.json.encode({"error": error_of(internal, form.path)})
            return
    for last in form.end(text.usage if includes_usage else None):
        yield last


@dataclass(slots=True)
class _Named:
    """Common fields of answers, and the names of their tokens."""

    id: str
    model: str
    text: Text
    with_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, object_name: str, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **choice}],
        }

    def is_empty(self, piece: TextPiece) -> bool:
        return not (piece.text or piece.log_probabilities is not None or self.with_ids)

    def end(self, last: dict[str, Any], usage: dict[str, Any] | None) -> Iterator[bytes]:
        yield msgspec.json.encode(last)
        if usage is not None:
            yield msgspec.json.encode({**last, "choices": [], "usage": usage})
        yield b"[DONE]"

    def ids(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        return {"token_ids": [piece.token for piece in pieces]} if self.with_ids else {}

    def token(self, token: int) -> str:
        return str(token) if self.text.tokenizer is None else self.text.tokenizer.name(token)

    def by_name(self, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log probabilities by the tokens' names. Of tokens with one name, the most likely one counts."""
        named: dict[str, float] = {}
        for token, value in likely:
            named.setdefault(self.token(token), value)
        return named

    def bytes_of(self, token: int) -> list[int]:
        tokenizer = self.text.tokenizer
        return list(str(token).encode() if tokenizer is None else tokenizer.bytes_of(token))


def _named(asked: _Asked, text: Text) -> _Named:
    """Make an answer's common fields. Without a tokenizer, answers have token ids instead of text."""
    kind = "chatcmpl" if isinstance(asked, ChatBody) else "cmpl"
    return _Named(
        f"{kind}-{uuid.uuid4().hex}", asked.model, text, bool(asked.return_token_ids) or not text.tokenizer
    )


@dataclass(frozen=True, slots=True)
class _Completion:
    """The format of `/v1/completions`."""

    text: Text
    named: _Named
    path: str = "/v1/"

    def start(self) -> None:
        return None

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        return None if self.named.is_empty(piece) else self._of([piece], None)

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        last = {"text": "", "logprobs": None, "finish_reason": self.text.finish_reason}
        return self.named.end(self.named.answer("text_completion", last), usage)

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        return {**self._of(pieces, self.text.finish_reason), "usage": self.text.usage}

    def _of(self, pieces: Sequence[TextPiece], reason: str | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        likely = None if self.text.likely is None else self._likely(pieces)
        choice = {"text": text, "logprobs": likely, "finish_reason": reason, **self.named.ids(pieces)}
        return self.named.answer("text_completion", choice)

    def _likely(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        found = [(piece.token, *piece.log_probabilities) for piece in pieces if piece.log_probabilities is not None]
        return {
            "tokens": [self.named.token(token) for token, _, _ in found],
            "token_logprobs": [own for _, own, _ in found],
            "top_logprobs": [self.named.by_name(likely) for _, _, likely in found],
        }


@dataclass(frozen=True, slots=True)
class _Chat:
    """The format of `/v1/chat/completions`."""

    text: Text
    named: _Named
    path: str = "/v1/"

    def start(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        if self.named.is_empty(piece):
            return None
        answer = self._chunk({"content": piece.text}, None)
        answer["choices"][0] |= self.named.ids([piece])
        if self.text.likely is not None:
            answer["choices"][0]["logprobs"] = self._likely([piece])
        return answer

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        return self.named.end(self._chunk({}, self.text.finish_reason), usage)

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        likely = None if self.text.likely is None else self._likely(pieces)
        own = {"message": message, "logprobs": likely, "finish_reason": self.text.finish_reason}
        choice = {**own, **self.named.ids(pieces)}
        return {**self.named.answer("chat.completion", choice), "usage": self.text.usage}

    def _chunk(self, delta: Mapping[str, str], reason: str | None) -> dict[str, Any]:
        return self.named.answer(
            "chat.completion.chunk", {"delta": delta, "logprobs": None, "finish_reason": reason}
        )

    def _likely(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            return {"token": self.named.token(token), "logprob": value, "bytes": self.named.bytes_of(token)}

        return {
            "content": [
                {**entry(piece.token, own), "top_logprobs": [entry(token, value) for token, value in likely]}
                for piece in pieces
                if piece.log_probabilities is not None
                for own, likely in [piece.log_probabilities]
            ]
        }


@dataclass(frozen=True, slots=True)
class _Generated:
    """The format of Triton's generate extension. A stream's last event has the finish reason."""

    text: Text
    id: str
    path: str = "/v2/"

    def start(self) -> None:
        return None

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        is_last = self.text.finish_reason is not None
        return self.whole([piece]) if piece.text or is_last else None

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        return iter(())

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        info, reason = self.text.info, self.text.finish_reason
        return {
            **({"id": self.id} if self.id else {}),
            "model_name": info.name,
            "model_version": str(info.version),
            "text_output": "".join(piece.text for piece in pieces),
            **({"finish_reason": reason} if reason else {}),
        }


def _parsed(body: memoryview, of_type: type[_A]) -> tuple[_A, Sampler]:
    """Read a body. Raises InvalidRequest, also for fields that are not supported and would change the answer."""
    if sum(bytes(body).count(bracket) for bracket in (b"[", b"{")) > _MOST_LISTS:
        raise InvalidRequest(f"the request JSON has over {_MOST_LISTS} lists and objects; send fewer")
    refuse_unsupported(parse_json(body, dict[str, msgspec.Raw]), of_type)
    asked = parse_json(body, of_type)
    return asked, asked.sampler()


def parsed_generate(body: memoryview) -> tuple[GenerateBody, Sampler] | None:
    """Read a generate request; None if it has no text. Raises as `_parsed` does.

    Its `parameters` count as top-level fields.
    """
    sent = parse_json(body, dict[str, msgspec.Raw])
    if "text_input" not in sent:
        return None
    parameters = parse_json(memoryview(sent.pop("parameters", msgspec.Raw(b"{}"))), dict[str, msgspec.Raw])
    return _parsed(memoryview(msgspec.json.encode({**parameters, **sent})), GenerateBody)


def _parsed_prompt(given: msgspec.Raw, info: ModelInfo) -> str | list[int]:
    """Return a prompt's text, or its token ids. Raises InvalidRequest. Counts before it builds any objects."""
    raw = bytes(given)
    quotes = raw.count(b'"') - raw.count(b'\\"')
    if not quotes and (raw.count(b"[") > 2 or raw.count(b",") >= info.context):
        raise InvalidRequest(
            f"prompt has several lists, or more token ids than the {info.context} that model '{info.name}' takes; send"
            " one request for each, which the server computes together"
        )
    several = InvalidRequest(
        "prompt has several texts; send one request for each, which the server computes together"
    )
    if raw[:1] == b"[" and quotes > 2:
        raise several
    try:
        sent: Any = msgspec.json.decode(raw, type=str | list[str | int | list[int]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"prompt is neither a text nor a list of token ids: {error}") from error
    if isinstance(sent, list) and len(sent) == 1 and not isinstance(sent[0], int):
        sent = sent[0]
    if isinstance(sent, list) and not all(isinstance(token, int) for token in sent):
        raise several
    prompt: str | list[int] = sent
    return prompt


def _plain(message: Message) -> Message:
    """Return a message for templates. Raises InvalidRequest if it has no role, or a content that is not text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidRequest("every message needs a role, which is a string")
    if isinstance(content, list):
        kinds = {str(part.get("type") if isinstance(part, dict) else part)[:40] for part in content}
        if not kinds <= {"text"}:
            raise InvalidRequest(f"messages have parts of the kinds {', '.join(sorted(kinds))}; send text only")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest("the content of a message is a string, a list of parts, or null")
    return message


def _refuse_unread(messages: Sequence[Message], document: LanguageDocument) -> None:
    """Raise InvalidRequest for fields of messages, such as tool calls, that the chat template never reads."""
    template = document.chat_template or ""
    for message in messages:
        for name, value in message.items():
            if value and name not in _IGNORED_OF_MESSAGES and name not in template:
                raise InvalidRequest(
                    f"messages have the field '{name[:80]}', which the model's chat template does not read; leave it"
                    " out"
                )

"""Text generation, whole or as server-sent events: OpenAI's completions and chats, and Triton's generate."""

import asyncio
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
from cohabit.server.frontend.call_forms import CallForms
from cohabit.server.frontend.constraints import Grammar
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.generation import (
    LanguageDocuments,
    Prefixes,
    Text,
    TextPiece,
    generate,
)
from cohabit.server.frontend.grammar_process import Vocabulary
from cohabit.server.frontend.templates import REASONING, ChatTemplates, rendered
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
from cohabit.server.protocol.structured import ResponseFormat, Schema, TextStructure
from cohabit.server.protocol.tools import CallParser, NamedTool, Tool, ToolUse, tool_use

_log = logging.getLogger("cohabit.frontend")

MOST_TEXT_BYTES = 1 << 20
"""Maximum size of a body with a text to continue."""
_QUICK_BODY_BYTES = 2 << 10
_CHARACTERS_PER_TOKEN = 64
"""Maximum characters of a prompt per context token: longer prompts are refused untokenized."""
_USUAL_TOKENS = 16
"""OpenAI's `max_tokens` default for completions; chats may fill the context."""
_MOST_STOPS, _MOST_STOP_CHARACTERS = 4, 256
_MOST_TEXTS = 32
"""Maximum number of texts that a request has generated: one for each prompt, `n` times."""
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


_NULL = msgspec.Raw(b"null")


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
    n: Annotated[int, Meta(ge=1, le=_MOST_TEXTS)] | None = None
    """Number of texts for each prompt."""
    ignore_eos: bool | None = None
    """Not OpenAI's: ignores end tokens, for benchmarks."""
    return_token_ids: bool | None = None
    """Not OpenAI's: returns the token ids of each piece of text."""
    response_format: ResponseFormat | None = None
    structured_outputs: TextStructure | None = None
    """Not OpenAI's, like the next ones."""
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None

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

    def grammar(self) -> str | None:
        """Return the grammar that the texts follow, if any. Raises InvalidRequest."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice)
        structures = [self.structured_outputs] if self.structured_outputs is not None else []
        if any(value is not None for value in guided):
            structures.append(
                TextStructure(json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice)
            )
        grammars = [structure.grammar() for structure in structures]
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            grammars.append(grammar)
        if len(grammars) > 1:
            raise InvalidRequest("response_format, structured_outputs and guided_* exclude one another; send one")
        return grammars[0] if grammars else None

    def sampler(self, number: int = 0) -> Sampler:
        """Return the sampler of a prompt's text. With a seed, each of its texts has a seed of its own."""
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
            seed=None if self.seed is None else self.seed + number,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=bias,
        )
        return Sampler(sampling)


class CompletionBody(_Asked, kw_only=True):
    prompt: msgspec.Raw
    """A text, token ids, or a list of texts or of lists of token ids."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


_A = TypeVar("_A", bound=_Asked)


class ChatBody(_Asked, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: msgspec.Raw = _NULL
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None

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

    @property
    def text(self) -> Text: ...

    def start(self) -> dict[str, Any] | None:
        """The first event of a stream, before any piece."""
        ...

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        """Event of a piece; None if empty: an incomplete character, and token ids not requested."""
        ...

    def last(self) -> dict[str, Any] | None:
        """The event after the last piece of this text."""
        ...

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        """Yield the events after all texts, with usage if requested."""
        ...

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """The answer with this text alone."""
        ...


class CompletionsApi:
    """Every public method handles one endpoint, on the event loop's thread."""

    def __init__(self, plane: DataPlane, max_body_bytes: int) -> None:
        self._plane = plane
        self._documents = LanguageDocuments(plane.repository)
        self._prefixes = Prefixes()
        self._templates = ChatTemplates()
        self._call_forms = CallForms(self._templates)
        self._most_body_bytes = min(max_body_bytes, MOST_TEXT_BYTES)

    async def generate(
        self, asked: GenerateBody, sampler: Sampler, structure: str | None, info: ModelInfo, *, streams: bool
    ) -> web.StreamResponse:
        """Continue a text, for Triton's generate extension."""
        if asked.n not in (None, 1):
            raise InvalidRequest(f"n is {asked.n}; generate returns one text: send the request {asked.n} times")
        if asked.stream and not streams:
            raise InvalidRequest("stream is true, and generate returns the text in one piece; use generate_stream")
        with self._plane.fitting(info.key):
            document = await self._documents.of(info)
            tokenizer = await self._plane.tokenizers.of(info.name)
            prompt = await self._tokens(asked.text_input, info, tokenizer, adds_special=True)
            text = self._text(asked, sampler, info, tokenizer, prompt, document, None, structure)
        return await self._answer(asked, [_Generated(text, asked.id)], streams=streams)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete prompts."""
        async with self._read(request, CompletionBody, "send a shorter prompt") as read:
            asked, structure, info, document = read
            tokenizer = await self._plane.tokenizers.find(info.name)
            prompts = await self._prompts(asked.prompt, info, tokenizer)
            texts = self._texts(asked, info, tokenizer, prompts, document, asked.logprobs, structure)
        named = _named(asked, texts[0])
        forms = [_Completion(text, named, index) for index, text in enumerate(texts)]
        return await self._answer(asked, forms, streams=bool(asked.stream))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer the last message of a conversation."""
        async with self._read(request, ChatBody, "send a shorter conversation") as read:
            asked, structure, info, document = read
            if asked.top_logprobs and not asked.logprobs:
                raise InvalidRequest(f"top_logprobs is {asked.top_logprobs} without logprobs; set logprobs to true")
            tokenizer = await self._plane.tokenizers.of(info.name)
            conversation = [_plain(message) for message in asked.messages]
            _refuse_unread(conversation, document)
            slow = len(memoryview(asked.tools)) > _QUICK_BODY_BYTES
            offered, use = await self._plane.decode(slow, _parsed_tools, asked)
            form = None
            if use is not None:
                ends = [tokenizer.special(token) or tokenizer.name(token) for token in document.stop_ids]
                form = await self._call_forms.of(info.name, document, ends)
                structure = await self._plane.decode(slow, form.grammar, use, tokenizer.special_tokens, structure)
            prompt_text = await self._templates.call(
                info.name, rendered, info.name, document, conversation, offered
            )
            prompt = await self._tokens(prompt_text, info, tokenizer, adds_special=False)
            likely = (asked.top_logprobs or 0) if asked.logprobs else None
            texts = self._texts(asked, info, tokenizer, [prompt], document, likely, structure)
            for text in texts:
                text.shows_special = use is not None
        named = _named(asked, texts[0])
        parsers = [CallParser(form, use) if form is not None and use is not None else None for _ in texts]
        forms = [_Chat(text, named, index, parsers[index]) for index, text in enumerate(texts)]
        return await self._answer(asked, forms, streams=bool(asked.stream))

    @asynccontextmanager
    async def _read(
        self, request: web.Request, of_type: type[_A], way_out: str
    ) -> AsyncIterator[tuple[_A, str | None, ModelInfo, LanguageDocument]]:
        """Read a body into memory leased for this block, and find its model. Counts mismatched requests.

        The second value is the grammar of its texts.
        """
        plane = self._plane
        with plane.memory.lease() as lease:
            body = await read_body(request, lease, self._most_body_bytes, way_out)
            asked, _, structure = await plane.decode(len(body) > _QUICK_BODY_BYTES, _parsed, body, of_type)
            info = plane.require_ready(asked.model)
            with plane.fitting(info.key):
                yield asked, structure, info, await self._documents.of(info)

    async def _prompts(
        self, given: msgspec.Raw, info: ModelInfo, tokenizer: LoadedTokenizer | None
    ) -> list[list[int]]:
        slow = len(memoryview(given)) > _QUICK_BODY_BYTES
        prompts: list[list[int]] = []
        for prompt in await self._plane.decode(slow, _parsed_prompts, given, info):
            if isinstance(prompt, list):
                prompts.append(prompt)
            elif tokenizer is None:
                raise InvalidRequest(f"model '{info.name}' has no tokenizer; send the prompt as token ids")
            else:
                prompts.append(await self._tokens(prompt, info, tokenizer, adds_special=True))
        return prompts

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

    def _texts(
        self,
        asked: _Asked,
        info: ModelInfo,
        tokenizer: LoadedTokenizer | None,
        prompts: Sequence[list[int]],
        document: LanguageDocument,
        likely: int | None,
        structure: str | None,
    ) -> list[Text]:
        """Return `n` texts for each prompt, in the order of their indices in the answer."""
        each = asked.n or 1
        if len(prompts) * each > _MOST_TEXTS:
            raise InvalidRequest(
                f"{len(prompts)} prompts and n={each} make {len(prompts) * each} texts; a request has at most"
                f" {_MOST_TEXTS}: send several"
            )
        return [
            self._text(asked, asked.sampler(number), info, tokenizer, prompt, document, likely, structure)
            for prompt in prompts
            for number in range(each)
        ]

    def _text(
        self,
        asked: _Asked,
        sampler: Sampler,
        info: ModelInfo,
        tokenizer: LoadedTokenizer | None,
        prompt: list[int],
        document: LanguageDocument,
        likely: int | None,
        structure: str | None,
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
        grammar = None
        if structure is not None:
            if asked.ignore_eos:
                raise InvalidRequest(
                    "ignore_eos is true, and a text with a schema or tools ends by itself; leave it out"
                )
            if tokenizer is None or tokenizer.file is None:
                raise InvalidRequest(f"model '{info.name}' has no tokenizer, so that no text can follow a schema")
            ends = tuple(token for token in document.stop_ids if token < vocabulary)
            grammar = Grammar(structure.encode(), Vocabulary(tokenizer.file, vocabulary, ends))
        return Text(
            info,
            tokenizer,
            prompt,
            sampler,
            stops,
            stop_ids=() if asked.ignore_eos else document.stop_ids,
            cleans_up_spaces=document.cleans_up_spaces and grammar is None,
            most=usual if most is None else most,
            likely=likely,
            grammar=grammar,
        )

    async def _answer(self, asked: _Asked, forms: Sequence[_Form], *, streams: bool) -> web.StreamResponse:
        pieces = _together([generate(self._plane, form.text, self._prefixes) for form in forms])
        if not streams:
            found: list[list[TextPiece]] = [[] for _ in forms]
            async with aclosing(pieces):
                async for number, piece in pieces:
                    found[number].append(piece)
            answers = [form.whole(own) for form, own in zip(forms, found, strict=True)]
            if len(answers) > 1:
                choices = [choice for answer in answers for choice in answer["choices"]]
                answers[0] |= {"choices": choices, "usage": _usage(asked, forms)}
            return json_response(answers[0])
        includes_usage = asked.stream_options is not None and asked.stream_options.include_usage
        events = _events(pieces, forms, asked if includes_usage else None)
        return EventStream(events, await anext(events), _WRITE_S)


async def _together(
    texts: Sequence[AsyncGenerator[TextPiece, None]],
) -> AsyncGenerator[tuple[int, TextPiece], None]:
    """Yield the pieces of texts that are generated at the same time, each with its text's number.

    An error of one text, and closing this generator, end all of them.
    """
    if len(texts) == 1:
        async with aclosing(texts[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return

    async def next_of(number: int) -> TextPiece | None:
        return await anext(texts[number], None)

    awaited = {asyncio.create_task(next_of(number)): number for number in range(len(texts))}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = awaited.pop(task)
                if (next_piece := task.result()) is not None:
                    yield number, next_piece
                    awaited[asyncio.create_task(next_of(number))] = number
    finally:
        for task in awaited:
            task.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)
        for text in texts:
            await text.aclose()


async def _events(
    pieces: AsyncGenerator[tuple[int, TextPiece], None], forms: Sequence[_Form], counted: _Asked | None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, with usage at its end if `counted`. Each text begins and ends with an event.

    Raises errors before the first piece; later errors become events.
    """
    ended = [False] * len(forms)

    def last_of(number: int) -> Iterator[bytes]:
        ended[number] = True
        if (last := forms[number].last()) is not None:
            yield msgspec.json.encode(last)

    async with aclosing(pieces):
        first = await anext(pieces, None)
        for form in forms:
            if (start := form.start()) is not None:
                yield msgspec.json.encode(start)
        try:
            piece = first
            while piece is not None:
                form = forms[piece[0]]
                if (event := form.chunk(piece[1])) is not None:
                    yield msgspec.json.encode(event)
                if form.text.finish_reason is not None:
                    for event_bytes in last_of(piece[0]):
                        yield event_bytes
                piece = await anext(pieces, None)
        except RequestError as error:
            yield msgspec.json.encode({"error": error_of(error, forms[0].path)})
            return
        except Exception:
            internal = Refused("EngineFailed", log_internal_error(_log, path=forms[0].path))
            yield msgspec.json.encode({"error": error_of(internal, forms[0].path)})
            return
    for number, has_ended in enumerate(ended):
        if not has_ended:
            for event_bytes in last_of(number):
                yield event_bytes
    for end in forms[0].end(None if counted is None else _usage(counted, forms)):
        yield end


def _usage(asked: _Asked, forms: Sequence[_Form]) -> dict[str, Any]:
    """Return the tokens of all texts. A prompt with several texts counts once, as in OpenAI's API."""
    each = [form.text.usage for form in forms]
    prompt = sum(usage["prompt_tokens"] for usage in each[:: asked.n or 1])
    completion = sum(usage["completion_tokens"] for usage in each)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in each[:: asked.n or 1])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(slots=True)
class _Named:
    """Common fields of answers, and the names of their tokens."""

    id: str
    model: str
    text: Text
    with_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, object_name: str, *choices: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }

    def is_empty(self, piece: TextPiece) -> bool:
        return not (piece.text or piece.log_probabilities is not None or self.with_ids)

    def end(self, object_name: str, usage: dict[str, Any] | None) -> Iterator[bytes]:
        if usage is not None:
            yield msgspec.json.encode({**self.answer(object_name), "usage": usage})
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
    index: int = 0
    path: str = "/v1/"

    def start(self) -> None:
        return None

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        return None if self.named.is_empty(piece) else self._of([piece], None)

    def last(self) -> dict[str, Any]:
        reason = self.text.finish_reason
        choice = {"index": self.index, "text": "", "logprobs": None, "finish_reason": reason}
        return self.named.answer("text_completion", choice)

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        return self.named.end("text_completion", usage)

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        return {**self._of(pieces, self.text.finish_reason), "usage": self.text.usage}

    def _of(self, pieces: Sequence[TextPiece], reason: str | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        likely = None if self.text.likely is None else self._likely(pieces)
        choice = {"index": self.index, "text": text, "logprobs": likely, "finish_reason": reason}
        return self.named.answer("text_completion", choice | self.named.ids(pieces))

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
    index: int = 0
    calls: CallParser | None = None
    """Finds the calls of tools in the text."""
    path: str = "/v1/"

    def start(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def chunk(self, piece: TextPiece) -> dict[str, Any] | None:
        delta: Mapping[str, Any] = {"content": piece.text}
        if self.calls is not None:
            delta = self.calls.push(piece.text, is_last=self.text.finish_reason is not None)
        if self.named.is_empty(piece) or not (delta or piece.log_probabilities or self.named.with_ids):
            return None
        answer = self._chunk(delta, None)
        answer["choices"][0] |= self.named.ids([piece])
        if self.text.likely is not None:
            answer["choices"][0]["logprobs"] = self._likely([piece])
        return answer

    def last(self) -> dict[str, Any]:
        return self._chunk({}, self._finish_reason)

    def end(self, usage: dict[str, Any] | None) -> Iterator[bytes]:
        return self.named.end("chat.completion.chunk", usage)

    def whole(self, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        if self.calls is not None:
            self.calls.push(message["content"], is_last=True)
            message["content"] = self.calls.content or None
            message |= {"tool_calls": self.calls.calls} if self.calls.calls else {}
        likely = None if self.text.likely is None else self._likely(pieces)
        own = {"index": self.index, "message": message, "logprobs": likely}
        choice = own | {"finish_reason": self._finish_reason} | self.named.ids(pieces)
        return {**self.named.answer("chat.completion", choice), "usage": self.text.usage}

    @property
    def _finish_reason(self) -> str | None:
        reason = self.text.finish_reason
        return "tool_calls" if reason == "stop" and self.calls is not None and self.calls.calls else reason

    def _chunk(self, delta: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.named.answer("chat.completion.chunk", choice)

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

    def last(self) -> None:
        return None

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


def _parsed(body: memoryview, of_type: type[_A]) -> tuple[_A, Sampler, str | None]:
    """Read a body. Returns its first text's sampler, and the grammar of its texts, too.

    Raises InvalidRequest, also for fields that are not supported and would change the answer.
    """
    if sum(bytes(body).count(bracket) for bracket in (b"[", b"{")) > _MOST_LISTS:
        raise InvalidRequest(f"the request JSON has over {_MOST_LISTS} lists and objects; send fewer")
    refuse_unsupported(parse_json(body, dict[str, msgspec.Raw]), of_type)
    asked = parse_json(body, of_type)
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options need 'stream': true, which is missing")
    return asked, asked.sampler(), asked.grammar()


def parsed_generate(body: memoryview, info: ModelInfo) -> tuple[GenerateBody, Sampler, str | None] | None:
    """Read a generate request; None if it has tensors instead of a text. Raises as `_parsed` does.

    Its `parameters` count as top-level fields.
    """
    sent = parse_json(body, dict[str, msgspec.Raw])
    if "text_input" not in sent and any(tensor.name in sent for tensor in info.inputs):
        return None
    parameters = parse_json(memoryview(sent.pop("parameters", msgspec.Raw(b"{}"))), dict[str, msgspec.Raw])
    return _parsed(memoryview(msgspec.json.encode({**parameters, **sent})), GenerateBody)


def _parsed_tools(asked: ChatBody) -> tuple[list[dict[str, Any]] | None, ToolUse | None]:
    """Return the tools for the chat template, and what a text may call. Raises InvalidRequest."""
    raw = memoryview(asked.tools)
    tools = [] if bytes(raw) == bytes(_NULL) else parse_json(raw, list[Tool])
    use = tool_use(tools, asked.tool_choice, asked.parallel_tool_calls)
    return (None if use is None else parse_json(raw, list[dict[str, Any]])), use


def _parsed_prompts(given: msgspec.Raw, info: ModelInfo) -> list[str | list[int]]:
    """Return the prompts' texts, or their token ids. Raises InvalidRequest. Counts before it builds any objects."""
    raw = bytes(given)
    quotes = raw.count(b'"') - raw.count(b'\\"')
    lists = raw.count(b"[")
    if raw[:1] == b"[" and (quotes > 2 * _MOST_TEXTS or (not quotes and lists > 1 + _MOST_TEXTS)):
        raise InvalidRequest(f"prompt has over {_MOST_TEXTS} texts; send several requests")
    if not quotes and raw.count(b",") >= max(lists - 1, 1) * info.context:
        raise InvalidRequest(
            f"prompt has more token ids than the {info.context} that model '{info.name}' takes for each text"
        )
    try:
        sent: str | list[int] | list[str | list[int]] = msgspec.json.decode(
            raw, type=str | list[str | int | list[int]]
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"prompt is neither a text nor a list of token ids: {error}") from error
    if isinstance(sent, str) or all(isinstance(token, int) for token in sent):
        return [sent]  # type: ignore[list-item]
    if any(isinstance(prompt, int) for prompt in sent):
        raise InvalidRequest("prompt has token ids beside texts or lists; send texts, or lists of token ids")
    return list(sent)  # type: ignore[arg-type]


def _plain(message: Message) -> Message:
    """Return a message for templates. Raises InvalidRequest if it has no role, or a content that is not text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidRequest("every message needs a role, which is a string")
    if isinstance(content, list):
        kinds = {str(part.get("type") if isinstance(part, dict) else part)[:40] for part in content}
        if not kinds <= {"text"}:
            raise InvalidRequest(f"messages have parts of the kinds {', '.join(sorted(kinds))}; send text only")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise InvalidRequest(
                "a part of a message has no 'text', which is a string; send it, or leave the part out"
            )
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

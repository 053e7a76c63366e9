"""Endpoints for encoders of texts: OpenAI's embeddings and its list of models, and reranking.

Embeddings: texts in, one vector of length 1 for each out. Reranking, as Jina's and Cohere's clients ask for it: a query
and documents in, a score for each document out.
"""

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta

from cohabit.server.errors import InvalidRequest, ModelNotFound
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.generation import generates
from cohabit.server.frontend.memory import Lease
from cohabit.server.frontend.threads import call
from cohabit.server.frontend.tokenizers import LoadedTokenizer, tokens_in
from cohabit.server.http.answers import JSON, LeasedResponse, json_response
from cohabit.server.http.body import read_body
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Parameters
from cohabit.server.protocol.embedding import (
    MOST_TOKENS,
    NEEDED,
    NEEDED_TO_RANK,
    TextEncoder,
    Tokens,
    embedding_output,
    scoring_output,
    texts_of,
)
from cohabit.server.protocol.json_body import parse_json
from cohabit.server.protocol.tensors import to_json

_T = TypeVar("_T")
_MOST_BODY_BYTES = 4 << 20
_TEXT_BYTES = 4
"""Maximum bytes of memory per character of a text."""
_QUICK_BODY_BYTES = 2 << 10
"""Largest texts that the event loop tokenizes; threads handle the rest."""
_QUICK_VALUES = 64 << 10
"""Maximum size, in numbers, of token states and vectors that the event loop handles itself."""


class EmbeddingsBody(msgspec.Struct):
    model: str
    input: msgspec.Raw
    """A text, texts, token ids, or lists of token ids."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate: bool = False
    """Not OpenAI's: whether texts that are too long lose their ends; otherwise they are refused."""
    parameters: Parameters = {}
    """Not OpenAI's: parameters of an inference request, such as `timeout` and `priority`."""


class RerankBody(msgspec.Struct):
    model: str
    query: str
    documents: msgspec.Raw
    """Texts."""
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    truncate: bool = False
    """Whether pairs that are too long lose their ends; otherwise they are refused."""
    parameters: Parameters = {}
    """Parameters of an inference request, such as `timeout` and `priority`."""


class OpenAiApi:
    """Every public method handles one endpoint, on the event loop's thread."""

    def __init__(self, plane: DataPlane, max_body_bytes: int) -> None:
        self._plane = plane
        self._most_body_bytes = min(max_body_bytes, _MOST_BODY_BYTES)

    async def models(self, request: web.Request) -> web.Response:
        """List the models that take texts, or describe one."""
        wanted = request.match_info.get("model")
        ready = self._plane.ready_infos()
        infos = {
            info.name: info for info in ready if embedding_output(info) or scoring_output(info) or generates(info)
        }
        states = {name: await call(True, self._plane.tokenizers.state, name) for name in infos}
        listed = [
            {"id": name, "object": "model", "created": int(state.changed_ns / 1e9), "owned_by": "cohabit"}
            for name, state in sorted(states.items())
            if state is not None
        ]
        if wanted is None:
            return json_response({"object": "list", "data": listed})
        found = [model for model in listed if model["id"] == wanted]
        if not found:
            raise ModelNotFound(wanted)
        return json_response(found[0])

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """Tokenize texts, infer in the largest batches that the model takes, and pool the states of their tokens."""
        plane = self._plane
        with plane.memory.lease() as lease:
            body = await read_body(request, lease, self._most_body_bytes, "send fewer texts")
            slow = len(body) > _QUICK_BODY_BYTES
            asked = await plane.decode(slow, parse_json, body, EmbeddingsBody)
            info = plane.require_ready(asked.model)
            with plane.answering(info.key):
                with plane.fitting(info.key):
                    loaded = await plane.tokenizers.of(info.name)
                    encoder = self._encoder(info, loaded)
                    _check_dimensions(asked, encoder)
                    texts = await self._tokens(asked, encoder, loaded, lease, slow=slow)
                size = (len(texts), encoder.width)
                vectors = plane.memory.array(lease.take(4 * size[0] * size[1]), "<f4", size)
                done = 0
                for batch in encoder.batches(texts):
                    read = partial(encoder.vectors, batch)
                    vectors[done : done + len(batch)] = await _inferred(
                        plane, encoder, batch, asked.parameters, read
                    )
                    done += len(batch)
                count = sum(map(len, texts))
                written = await call(vectors.size > _QUICK_VALUES, _written, asked, vectors, count)
            return LeasedResponse(lease, (written,), {hdrs.CONTENT_TYPE: JSON})

    async def _tokens(
        self, asked: EmbeddingsBody, encoder: TextEncoder, loaded: LoadedTokenizer, lease: Lease, *, slow: bool
    ) -> list[Tokens]:
        """Return each text's token ids in leased memory. Raises InvalidRequest, and Overloaded."""
        decode, most = self._plane.decode, encoder.most_tokens if asked.truncate else None
        as_text = lease.reserve(_TEXT_BYTES * len(memoryview(asked.input)))  # only counted, not used
        given = await decode(slow, texts_of, asked.input, encoder)
        texts = await tokens_in(lease, given, lambda piece: decode(slow, loaded.tokens, piece, most=most))
        lease.free(as_text)
        return texts

    def _encoder(self, info: ModelInfo, loaded: LoadedTokenizer) -> TextEncoder:
        """Raises InvalidRequest for a model that cannot embed texts."""
        output = embedding_output(info)
        if output is None:
            raise InvalidRequest(f"model '{info.name}' makes no embeddings of texts: {NEEDED}")
        return TextEncoder(info, output, self._plane.pooling(info), loaded.padding_id)

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        """Score documents with a cross-encoder, which reads each with the query; the best first.

        A score is the logistic function of the model's one logit.
        """
        plane = self._plane
        with plane.memory.lease() as lease:
            body = await read_body(request, lease, self._most_body_bytes, "send fewer documents")
            slow = len(body) > _QUICK_BODY_BYTES
            asked = await plane.decode(slow, parse_json, body, RerankBody)
            info = plane.require_ready(asked.model)
            with plane.answering(info.key):
                with plane.fitting(info.key):
                    loaded = await plane.tokenizers.of(info.name)
                    encoder = _scorer(info, loaded)
                    lease.take(_TEXT_BYTES * len(body))  # only counted, not used
                    documents = await plane.decode(slow, _documents, asked, encoder)
                scores, count = await self._scores(asked, documents, encoder, loaded, slow=slow)
        best = sorted(range(len(documents)), key=lambda n: -scores[n])[: asked.top_n]
        results = [
            {"index": n, "relevance_score": scores[n]}
            | ({"document": {"text": documents[n]}} if asked.return_documents else {})
            for n in best
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"model": asked.model, "object": "list", "results": results, "usage": usage})

    async def _scores(
        self,
        asked: RerankBody,
        documents: Sequence[str],
        encoder: TextEncoder,
        loaded: LoadedTokenizer,
        *,
        slow: bool,
    ) -> tuple[list[float], int]:
        """Return the documents' scores, and the number of all pairs' tokens. Raises InvalidRequest, and Overloaded."""
        plane, most = self._plane, encoder.most_tokens if asked.truncate else None
        rows = max(encoder.info.max_batch_size, 1)
        scores: list[float] = []
        count = 0
        # A batch's pairs at a time: their tokens take little memory.
        for start in range(0, len(documents), rows):
            piece = documents[start : start + rows]
            pairs = await plane.decode(slow, loaded.pairs, [asked.query] * len(piece), piece, most)
            count += sum(len(ids) for ids, _ in pairs)
            if count > MOST_TOKENS:
                raise InvalidRequest(f"query and documents have over {MOST_TOKENS} tokens; send fewer documents")
            done = 0
            for batch in encoder.batches([ids for ids, _ in pairs]):
                types = [types for _, types in pairs[done : done + len(batch)]]
                found = await _inferred(plane, encoder, batch, asked.parameters, encoder.scores, types)
                scores += found[: len(batch)]
                done += len(batch)
        return scores, count


async def _inferred(
    plane: DataPlane,
    encoder: TextEncoder,
    texts: Sequence[Tokens],
    parameters: Parameters,
    read: Callable[[Answer], _T],
    types: Sequence[Tokens] | None = None,
) -> _T:
    """Infer a batch of texts, with the types of their tokens. Returns what `read` makes of the answer."""
    with plane.memory.lease() as lease, plane.regions.use() as regions:
        with plane.fitting(encoder.info.key):
            inference = encoder.request(texts, parameters, regions, types)
        answer = await plane.infer(inference, encoder.info, lease)
        slow = answer.outputs[encoder.output.name].size > _QUICK_VALUES
        return await call(slow, read, answer)


def _check_dimensions(asked: EmbeddingsBody, encoder: TextEncoder) -> None:
    if asked.dimensions not in (None, encoder.width):
        raise InvalidRequest(
            f"dimensions is {asked.dimensions}, the embeddings of model '{asked.model}' have {encoder.width}; leave"
            " dimensions out"
        )


def _written(asked: EmbeddingsBody, vectors: Array, tokens: int) -> bytes:
    """Return the answer: vectors as JSON, or as base64 of little-endian float32. `tokens` is the total number."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": to_json(vector)
            if asked.encoding_format == "float"
            else base64.b64encode(vector.tobytes()).decode(),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": asked.model, "usage": usage})


def _scorer(info: ModelInfo, loaded: LoadedTokenizer) -> TextEncoder:
    """Raises InvalidRequest for a model that scores no pairs of texts."""
    output = scoring_output(info)
    if output is None:
        raise InvalidRequest(f"model '{info.name}' ranks no documents: {NEEDED_TO_RANK}")
    return TextEncoder(info, output, "", loaded.padding_id)


def _documents(asked: RerankBody, encoder: TextEncoder) -> list[str]:
    """Raises InvalidRequest for what are no texts, and for texts that are longer than any that the model takes."""
    if len(asked.query) > encoder.most_characters:
        raise InvalidRequest(
            f"the query has {len(asked.query)} characters; model '{encoder.info.name}' takes at most"
            f" {encoder.most_characters}; send a shorter one"
        )
    texts = texts_of(asked.documents, encoder, "documents")
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise InvalidRequest("documents are token ids; send texts")
    return found

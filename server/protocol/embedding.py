"""Embeddings of texts: inference requests for token ids, and the vectors of their answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from operator import eq
from typing import Any

import msgspec
import numpy as np

from cohabit.planner.shapes import Dimension, evaluate, names_in
from cohabit.server.errors import InvalidRequest
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.ipc.request import Answer, Parameters, Request, RequestedOutput
from cohabit.server.protocol.datatypes import BF16, DTYPES, float32_of_bf16
from cohabit.server.protocol.matching import InputBody, RequestBody, fit
from cohabit.server.protocol.shared_memory import RegionUse
from cohabit.server.protocol.tensors import MOST_TEXTS

_TOKENS, MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
TOKEN_TENSORS = (_TOKENS, MASK, _TYPES)
"""Tensors of a text: its token ids, 1 for each of them and 0 for padding, and which of two texts each belongs to."""
_VECTORS = ("sentence_embedding", "embedding", "text_embeds")
"""Outputs with a vector for each row, in order of preference."""
_STATES = "last_hidden_state"
"""The output with a vector for each token, which are pooled."""
NEEDED = (
    f"it needs an input {_TOKENS} [batch, tokens], no others but {MASK} and {_TYPES}, and an output {_STATES} or"
    f" {' or '.join(_VECTORS)}"
)

_SCORES = "logits"
"""The output with a number for each row: how relevant a document is to a query."""
NEEDED_TO_RANK = (
    f"it needs an input {_TOKENS} [batch, tokens], no others but {MASK} and {_TYPES}, and an output {_SCORES}"
    " [batch, 1]"
)

MOST_TOKENS = 300_000
"""Maximum number of tokens of a request, as OpenAI's."""
CHARACTERS_PER_TOKEN = 64
"""Maximum characters of a text per token: longer texts are refused untokenized. Tokens have four on average."""
_TEXTS = msgspec.json.Decoder(str | list[str | int])
_IDS = msgspec.json.Decoder(list[int | list[int]])

Tokens = Array
"""Token ids of a text."""

_POOLED: Mapping[str, Callable[[Array], Array]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "lasttoken": lambda states: states[-1],
    "max": lambda states: states.max(axis=0),
}
"""A text's vector from the states of its tokens [tokens, width], by pooling."""


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Makes requests from token ids, and vectors from their answers, for one model."""

    info: ModelInfo
    output: TensorSpec
    """A vector for each token, or one for the text."""
    pooling: str
    """How the states of a text's tokens become its vector, one of POOLINGS."""
    padding_id: int

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return self.output.shape[-1]

    @property
    def has_mask(self) -> bool:
        """Whether the model gets a mask of the padding."""
        return any(tensor.name == MASK for tensor in self.info.inputs)

    def batches(self, texts: Sequence[Tokens]) -> Iterator[Sequence[Tokens]]:
        """Yield texts in order, in the largest possible batches. Without a mask, texts of a batch have one length."""
        sizes = self.info.only_batches or range(1, max(self.info.max_batch_size, 1) + 1)
        start = 0
        while start < len(texts):
            alike = [len(text) for text in texts[start : start + max(sizes)]]
            if not self.has_mask:
                alike = list(takewhile(partial(eq, alike[0]), alike))
            count = max((size for size in sizes if size <= len(alike)), default=len(alike))
            yield texts[start : start + count]
            start += count

    def request(
        self,
        texts: Sequence[Tokens],
        parameters: Parameters,
        regions: RegionUse,
        types: Sequence[Tokens] | None = None,
    ) -> Request:
        """Return the inference request for texts, with the types of their tokens (by default 0).

        Raises InvalidRequest for texts that are too long.
        """
        length = padded_length(texts, self._lengths, self.info.name, has_mask=self.has_mask)
        arrays = token_arrays(texts, types, length, self.padding_id)
        taken = [tensor for tensor in self.info.inputs if tensor.name in arrays]
        bodies = [InputBody(tensor.name, tensor.datatype, [len(texts), length]) for tensor in taken]

        def read(body: InputBody[list[int]]) -> Array:
            return arrays[body.name].astype(DTYPES[body.datatype])

        asked = [RequestedOutput(self.output.name, {"binary_data": True})]
        return fit(RequestBody(bodies, outputs=asked, parameters=parameters), self.info, regions, read)

    @property
    def most_characters(self) -> int:
        """Maximum number of characters of a text to tokenize."""
        return CHARACTERS_PER_TOKEN * self.most_tokens

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a text."""
        return self._lengths[-1]

    @property
    def _lengths(self) -> Sequence[int]:
        return lengths_of(self.info, _TOKENS)

    def vectors(self, texts: Sequence[Tokens], answer: Answer) -> Array:
        """Return a text's vector in each row, float32 and of length 1."""
        states = self._float32(answer)
        if states.ndim == 3:
            pool = _POOLED[self.pooling]
            states = np.stack([pool(row[: len(ids)]) for row, ids in zip(states, texts, strict=True)])
        norms = np.linalg.norm(states, axis=1, keepdims=True)
        return np.asarray(states / np.maximum(norms, np.finfo(np.float32).tiny))

    def scores(self, answer: Answer) -> list[float]:
        """Return each row's score: the logistic function of its logit."""
        logits = self._float32(answer)[:, 0]
        return [float(score) for score in 0.5 * (1 + np.tanh(logits / 2))]

    def _float32(self, answer: Answer) -> Array:
        values = answer.outputs[self.output.name]
        return float32_of_bf16(values) if self.output.datatype == BF16 else values.astype(np.float32, copy=False)


def lengths_of(info: ModelInfo, name: str) -> Sequence[int]:
    """Return the token counts that an input takes, ascending."""
    spec = next(tensor for tensor in info.inputs if tensor.name == name)
    size = spec.sizes[-1] if spec.sizes else spec.shape[-1]
    for dimension in info.dynamic.dimensions:
        if isinstance(size, str) and names_in(size) == {dimension.symbol}:
            return _sizes(dimension, size)
    return [spec.shape[-1]]


@lru_cache
def _sizes(dimension: Dimension, expression: str) -> Sequence[int]:
    """Return the values of an expression in a dimension's symbol, ascending."""
    allowed = (n for n in range(dimension.least, dimension.buckets[-1] + 1) if dimension.allows(n))
    return sorted(evaluate(expression, {dimension.symbol: dimension.symbol_value(n)}) for n in allowed)


def padded_length(texts: Sequence[Tokens], lengths: Sequence[int], model: str, *, has_mask: bool) -> int:
    """Return the one of a model's lengths to which texts are padded. Raises InvalidRequest if they cannot be."""
    longest, shortest = max(map(len, texts)), min(map(len, texts))
    length = next((n for n in lengths if n >= longest), None)
    if length is None:
        raise InvalidRequest(
            f"a text has {longest} tokens, model '{model}' takes at most {lengths[-1]}; send shorter texts"
        )
    if length > shortest and not has_mask:
        raise InvalidRequest(
            f"a text has {shortest} tokens, and model '{model}' takes {length}: it has no input {MASK} that would"
            " tell padding"
        )
    return length


def token_arrays(
    texts: Sequence[Tokens], types: Sequence[Tokens] | None, length: int, padding_id: int
) -> Mapping[str, Array]:
    """Return TOKEN_TENSORS by name, [texts, length], with the types of tokens (by default 0)."""
    tokens = np.full((len(texts), length), padding_id)
    mask, given_types = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
        if types is not None:
            given_types[row, : len(ids)] = types[row]
    return {_TOKENS: tokens, MASK: mask, _TYPES: given_types}


def texts_of(given: msgspec.Raw, encoder: TextEncoder, field: str = "input") -> list[str] | list[Tokens]:
    """Return the texts of a request's field, or their token ids. Raises InvalidRequest.

    Checks counts on the encoded bytes first, before it builds any objects.
    """
    raw = bytes(given)
    quotes, brackets, commas = raw.count(b'"') - raw.count(b'\\"'), raw.count(b"["), raw.count(b",")
    if quotes > 4 * MOST_TEXTS or (not quotes and brackets > 2 * MOST_TEXTS):  # at least twice as many texts
        raise InvalidRequest(f"{field} has over {MOST_TEXTS} texts")
    if not quotes and commas >= MOST_TOKENS:
        raise InvalidRequest(f"{field} has over {MOST_TOKENS} token ids")
    try:
        sent: Any = _TEXTS.decode(raw) if quotes else _IDS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"{field} is neither a text nor a list of texts, token ids or lists of token ids: {error}"
        ) from error
    if isinstance(sent, str):
        sent = [sent]
    if not quotes and sent and all(isinstance(item, int) for item in sent):
        sent = [sent]
    if not 1 <= len(sent) <= MOST_TEXTS:
        raise InvalidRequest(f"{field} has {len(sent)} texts, it can have 1 to {MOST_TEXTS}")
    for index, item in enumerate(sent):
        if isinstance(item, int):
            raise InvalidRequest(f"{field}[{index}] is a number among texts; give texts, or token ids alone")
        if isinstance(item, str) and len(item) > encoder.most_characters:
            raise InvalidRequest(
                f"{field}[{index}] has {len(item)} characters; model '{encoder.info.name}' takes at most"
                f" {encoder.most_characters}; send shorter texts"
            )
    texts: list[str] = sent
    return texts if quotes else [_ids(ids, index) for index, ids in enumerate(sent)]


def _ids(ids: list[int], index: int) -> Tokens:
    if not ids:
        raise InvalidRequest(f"input[{index}] has no tokens")
    if not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise InvalidRequest(f"input[{index}] has a number that is not a token id")
    return np.array(ids, np.int32)


def embedding_output(info: ModelInfo) -> TensorSpec | None:
    """Return the output for a model's embeddings; None if it does not embed texts."""
    if not _takes_texts(info):
        return None
    outputs = {tensor.name: tensor for tensor in info.outputs}
    wanted = [(name, 2) for name in _VECTORS] + [(_STATES, 3)]
    found = (
        outputs[name] for name, rank in wanted if name in outputs and len(info.wire_shape(outputs[name])) == rank
    )
    return next(found, None)


def scoring_output(info: ModelInfo) -> TensorSpec | None:
    """Return the output for a document's score; None if the model does not score texts."""
    found = (tensor for tensor in info.outputs if tensor.name == _SCORES and info.wire_shape(tensor)[1:] == (1,))
    return next(found, None) if _takes_texts(info) else None


def _takes_texts(info: ModelInfo) -> bool:
    required = {tensor.name: tensor for tensor in info.inputs if tensor.default is None}
    tokens = required.get(_TOKENS)
    return tokens is not None and required.keys() <= {_TOKENS, MASK, _TYPES} and len(info.wire_shape(tokens)) == 2

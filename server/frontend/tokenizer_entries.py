"""Executes tokenizers: entries that take texts (BYTES) and give token ids. The engine has no texts."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cohabit.server.errors import InvalidRequest
from cohabit.server.frontend.memory import Lease, inputs_in
from cohabit.server.frontend.tokenizers import LoadedTokenizer, Tokenizers, pieces
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import NO_LANE, Answer, Request, Timing
from cohabit.server.protocol.datatypes import DTYPES
from cohabit.server.protocol.embedding import (
    CHARACTERS_PER_TOKEN,
    MASK,
    MOST_TOKENS,
    Tokens,
    padded_length,
    token_arrays,
)

_QUICK_BYTES = 2 << 10
"""Largest texts that the event loop tokenizes; threads handle the rest."""
_MOST_CHARACTERS = 256 << 10
"""Maximum characters of a text for readers without a largest number of tokens."""

Lengths = Mapping[str, Sequence[int]]
"""Token counts that the readers of a tokenizer's outputs take, ascending, by model."""
NO_LENGTHS: Lengths = {}
Texts = tuple[str, ...]
"""A row's text, or its pair of texts."""


class TokenizerEntries:
    """Event loop's thread only."""

    def __init__(self, tokenizers: Tokenizers, decode: Callable[..., Awaitable[Any]]) -> None:
        """`decode` is `DataPlane.decode`: slow calls run on a thread, one at a time."""
        self._tokenizers = tokenizers
        self._decode = decode

    async def infer(
        self, request: Request, info: ModelInfo, lease: Lease, lengths: Lengths, *, truncates: bool
    ) -> Answer:
        """Tokenize texts, and pad them to a length that all readers take, or else to the longest text.

        The answer's arrays are in leased memory. Raises InvalidRequest, Refused and Overloaded.
        """
        began_s = time.monotonic()
        loaded = await self._tokenizers.of(info.name)
        slow = sum(len(text) for texts in request.inputs.values() for text in texts.flat) > _QUICK_BYTES
        model, common = _common(info, lengths)
        most = CHARACTERS_PER_TOKEN * common[-1] if common else _MOST_CHARACTERS
        rows = await self._decode(slow, _rows, request, info, most)
        encoded: list[tuple[Tokens, Tokens | None]] = []
        cut = common[-1] if common and truncates else None
        for piece in pieces(rows, lambda row: sum(map(len, row))):
            encoded += await self._decode(slow, _encoded, loaded, piece, cut)
            if sum(len(ids) for ids, _ in encoded) > MOST_TOKENS:
                raise InvalidRequest(f"the texts have over {MOST_TOKENS} tokens; send fewer")
        ids = [ids for ids, _ in encoded]
        if 0 in map(len, ids):
            row = [len(one) for one in ids].index(0)
            raise InvalidRequest(f"row {row} of input '{info.inputs[0].name}' has no tokens")
        has_mask = any(tensor.name == MASK for tensor in info.outputs)
        length = padded_length(ids, common or [max(map(len, ids))], model, has_mask=has_mask)
        if len(ids) * length > MOST_TOKENS:
            raise InvalidRequest(
                f"{len(ids)} texts, padded to {length} tokens, have over {MOST_TOKENS}; send fewer"
            )
        outputs = await self._decode(slow, _outputs, request, info, encoded, length, loaded.padding_id)
        took_s = time.monotonic() - began_s
        timing = Timing(began_s, began_s, took_s, took_s, rows=request.batch, lane=NO_LANE)
        return Answer(info.key, inputs_in(lease, outputs), timing)


def _common(info: ModelInfo, lengths: Lengths) -> tuple[str, Sequence[int]]:
    """Return the token counts that a tokenizer and all readers allow, and the model with the fewest; () for any."""
    fixed = info.outputs[0].shape[-1]
    by_model = {model: counts for model, counts in lengths.items() if counts[-1] > 0}
    if fixed > 0:
        by_model[info.name] = [fixed]
    if not by_model:
        return info.name, ()
    model = min(by_model, key=lambda name: by_model[name][-1])
    if not (common := sorted(set.intersection(*map(set, by_model.values())))):
        raise InvalidRequest(f"no number of tokens suits all of {', '.join(by_model)}, which read the same texts")
    return model, common


def _rows(request: Request, info: ModelInfo, most_characters: int) -> list[Texts]:
    """Decode the texts of each row. Raises InvalidRequest."""
    columns = [
        [_text(name, row, text, most_characters) for row, text in enumerate(request.inputs[name].flat)]
        for name in (tensor.name for tensor in info.inputs)
    ]
    if not columns[0] or len(columns[0]) != len(columns[-1]):
        counts = " and ".join(str(len(column)) for column in columns)
        raise InvalidRequest(f"there are {counts} texts; send at least one in each input, and equally many")
    return list(zip(*columns, strict=True))


def _text(name: str, row: int, text: bytes, most_characters: int) -> str:
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"row {row} of input '{name}' is not UTF-8: {error}") from error
    if len(decoded) > most_characters:
        raise InvalidRequest(
            f"row {row} of input '{name}' has {len(decoded)} characters, at most {most_characters} are tokenized;"
            " send shorter texts"
        )
    return decoded


def _encoded(loaded: LoadedTokenizer, rows: Sequence[Texts], most: int | None) -> Sequence[tuple[Tokens, Any]]:
    """Return the token ids of each row, and their types (None for 0)."""
    firsts, *others = zip(*rows, strict=True)
    try:
        if others:
            return loaded.pairs(firsts, others[0], most)
        return [(ids, None) for ids in loaded.tokens(firsts, most=most)]
    except Exception as error:  # the package raises no other class
        raise InvalidRequest(f"the texts cannot be tokenized: {error}") from error


def _outputs(
    request: Request, info: ModelInfo, encoded: Sequence[tuple[Tokens, Any]], length: int, padding_id: int
) -> dict[str, Array]:
    """Return the requested outputs, [rows, length]."""
    ids, types = zip(*encoded, strict=True)
    arrays = token_arrays(ids, None if types[0] is None else types, length, padding_id)
    asked = {output.name for output in request.outputs}
    return {t.name: arrays[t.name].astype(DTYPES[t.datatype]) for t in info.outputs if t.name in asked}

"""Tokenizers of text models: `tokenizer.json` in a model's folder, read on the model's first text."""

import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.file_state import FileState
from cohabit.server.frontend.memory import Lease
from cohabit.server.frontend.model_files import ModelFiles
from cohabit.server.ipc.model import TOKENIZER
from cohabit.server.protocol.embedding import MOST_TOKENS, Tokens

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_MOST_BYTES = 64 << 20
_TOKEN = np.dtype(np.int32)
_PADDING = ("[PAD]", "<pad>")
_TOKENIZED_TOGETHER = 16 << 10
"""Characters tokenized in one call: others have their turns in between, and memory is bounded."""
_WINDOW = 16
"""Least number of tokens that are decoded with a new one, unless the text has fewer."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete character is decoded to. As the end of a text, it may be completed by further tokens."""
_MOST_ANCHORS = 4096
_CLEANING = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What transformers replaces in decoded texts if a tokenizer cleans up spaces, in this order."""
_CLEANED = 8
"""Maximum number of characters, counted from a space, that cleaning up looks at."""


def _byte_of_letter() -> dict[str, int]:
    """Return the byte of each letter of byte-level tokens: printable Latin-1 stands for itself, others follow 255."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, and what its tokens stand for."""

    tokenizer: "Tokenizer"
    padding_id: int

    def tokens(self, texts: Sequence[str], *, adds_special: bool = True, most: int | None = None) -> list[Tokens]:
        """Return the token ids of each text. Releases the GIL meanwhile, unlike `encode`.

        `adds_special` adds the special tokens that the tokenizer puts around a text. Texts of over `most` tokens,
        special ones included, lose their ends.
        """
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=adds_special and most is None)
        if most is not None:
            room = self._room(most, is_pair=False)
            for one in encoded:
                one.truncate(room)
            encoded = [self.tokenizer.post_process(one, None, adds_special) for one in encoded]
        return [np.array(one.ids, _TOKEN) for one in encoded]

    def pairs(self, firsts: Sequence[str], others: Sequence[str], most: int | None) -> list[tuple[Tokens, Tokens]]:
        """Return the token ids of pairs of texts, and their types.

        Pairs of over `most` tokens, special ones included, lose the end of the longer text, and then of both.
        """
        if most is None:
            whole = self.tokenizer.encode_batch_fast(list(zip(firsts, others, strict=True)))
            return [_ids_and_types(one.ids, one.type_ids) for one in whole]
        # Texts are cut before special tokens are put around them. Cutting changes them, so each pair has its own.
        room, pairs = self._room(most, is_pair=True), []
        texts = self.tokenizer.encode_batch_fast([*others, *firsts], add_special_tokens=False)
        for other, own in zip(texts[: len(others)], texts[len(others) :], strict=True):
            first_length, other_length = _cut_lengths(len(own.ids), len(other.ids), room)
            own.truncate(first_length)
            other.truncate(other_length)
            types = [0] * first_length + [1] * other_length
            one = self.tokenizer.post_process(own, other, True)
            # Without a processor, nothing sets the types of a second text that was tokenized alone.
            pairs.append(_ids_and_types(one.ids, one.type_ids if self.tokenizer.post_processor else types))
        return pairs

    def _room(self, most: int, *, is_pair: bool) -> int:
        """Return the number of tokens of text that fit beside the special ones."""
        return max(most - int(self.tokenizer.num_special_tokens_to_add(is_pair)), 0)

    def decoder(self, prompt: Sequence[int], *, cleans_up: bool = False) -> "TextDecoder":
        """Return a decoder for the tokens after a prompt. `cleans_up` is `LanguageDocument.cleans_up_spaces`."""
        return TextDecoder(self, prompt, cleans_up)

    def special(self, token: int) -> str:
        """Return the text of a special token; empty for other tokens."""
        added = self._added.get(token)
        return added.content if added is not None and added.special else ""

    def is_shown(self, token: int) -> bool:
        """Whether a token adds to the text: it is known, and not special."""
        return not self.special(token) and self.tokenizer.id_to_token(token) is not None

    def byte(self, token: int) -> int | None:
        """Return the byte of a byte-fallback token, which is decoded with the bytes around it; None for others."""
        found = _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token) or "") if self._falls_back else None
        return None if found is None else int(found[1], 16)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds within a text, of UTF-8 characters that may be incomplete."""
        name, added = self.tokenizer.id_to_token(token), self._added.get(token)
        if name is None or added is not None:
            return (name or "").encode()
        if (byte := self.byte(token)) is not None:
            return bytes([byte])
        if self._has_letters and all(letter in _BYTE_OF_LETTER for letter in name):
            return bytes(_BYTE_OF_LETTER[letter] for letter in name)
        # A token decoded alone may lose its leading space.
        before = [] if self._anchor is None else [self._anchor]
        start, text = (self.decoded(tokens) for tokens in (before, [*before, token]))
        return text.removeprefix(start).encode()

    def name(self, token: int) -> str:
        """Return a token's text for people, unlike that of other tokens: incomplete characters appear as bytes."""
        if self.tokenizer.id_to_token(token) is None:
            return f"token_id:{token}"
        try:
            return self.bytes_of(token).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token))

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    @cached_property
    def _added(self) -> Mapping[int, "AddedToken"]:
        added: Mapping[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        return added

    @cached_property
    def _decoders(self) -> set[str]:
        """The types of the tokenizer's decoders."""
        decoder = self.tokenizer.decoder
        state = {} if decoder is None else msgspec.json.decode(decoder.__getstate__())
        return {one["type"] for one in (state, *state.get("decoders", ())) if "type" in one}

    @property
    def _falls_back(self) -> bool:
        return "ByteFallback" in self._decoders

    @property
    def _has_letters(self) -> bool:
        return "ByteLevel" in self._decoders

    @cached_property
    def _anchor(self) -> int | None:
        """A token of plain text, in front of others."""
        tokens = range(min(self.tokenizer.get_vocab_size(), _MOST_ANCHORS))
        plain = (t for t in tokens if self.is_shown(t) and self.byte(t) is None)
        return next((t for t in plain if self.decoded([t]).isalnum()), None)


def _ids_and_types(ids: Sequence[int], types: Sequence[int]) -> tuple[Tokens, Tokens]:
    return np.array(ids, _TOKEN), np.array(types, _TOKEN)


def _cut_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the lengths of two texts that fit together, as the package tokenizers cuts the longest first."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


class TextDecoder:
    """Decodes tokens that arrive one by one. All pieces together are the decoded text of all tokens.

    A window of the last tokens is decoded for each token. Text that a further token may change is held back: the end of
    an incomplete character, and byte-fallback tokens, which become characters only if all bytes in a row are valid.
    """

    def __init__(self, tokenizer: LoadedTokenizer, prompt: Sequence[int], cleans_up: bool) -> None:
        self._tokenizer = tokenizer
        self._cleans_up = cleans_up
        self._tokens = self._end_of(prompt)
        """The window's tokens. Text is held back only after the first of them."""
        self._sent = self._window()
        """The part of the window's text that was returned, or that belongs to the prompt."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that no further token will change."""
        if not self._tokenizer.is_shown(token):
            return ""
        self._tokens.append(token)
        if self._tokenizer.byte(token) is not None:
            return ""
        text = self._window()
        stable = text.removesuffix(_INCOMPLETE)
        if self._cleans_up and (space := stable.find(" ", max(len(stable) - _CLEANED, 0))) >= 0:
            stable = stable[:space]
        piece = self._rest(stable)
        if len(self._tokens) > 2 * _WINDOW:
            held = len(text) - len(self._sent)
            self._tokens = self._end_of(self._tokens)
            text = self._window()
            self._sent = text[: len(text) - held]
        return piece

    def flush(self) -> str:
        """Return the held-back text, at the end of the text."""
        return self._rest(self._window())

    def _window(self) -> str:
        text = self._tokenizer.decoded(self._tokens)
        if self._cleans_up:
            for spaced, joined in _CLEANING:
                text = text.replace(spaced, joined)
        return text

    def _rest(self, text: str) -> str:
        """Return the text after the sent one. A character that began in the prompt replaces its incomplete form."""
        sent = self._sent
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sent, text, strict=False)))
        rest = text[alike:]
        if rest:
            self._sent = text
        return rest

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens that add to the text: at least a window, from a token on that is not a single byte.

        They begin with visible text, since decoders strip spaces at the start.
        """
        tokenizer, end = self._tokenizer, list[int]()
        for token in reversed(tokens):
            if not tokenizer.is_shown(token):
                continue
            end.append(token)
            if len(end) >= _WINDOW and tokenizer.byte(token) is None:
                start = tokenizer.decoded(end[: -_WINDOW // 2 - 1 : -1])
                if start.strip(_INCOMPLETE).strip():
                    break
        return end[::-1]


async def tokens_in(
    lease: Lease,
    given: Sequence[str] | Sequence[Tokens],
    tokenize: Callable[[Sequence[str]], Awaitable[list[Tokens]]],
) -> list[Tokens]:
    """Return token ids in leased memory, of the texts or as given. Raises InvalidRequest, and Overloaded."""
    texts: list[Tokens] = []
    count = 0
    for piece in pieces(given, len):
        made = [item for item in piece if not isinstance(item, str)] or await tokenize(piece)
        sizes = [tokens.size for tokens in made]
        if 0 in sizes:
            raise InvalidRequest(f"input[{len(texts) + sizes.index(0)}] has no tokens")
        count += sum(sizes)
        if count > MOST_TOKENS:
            raise InvalidRequest(f"input has over {MOST_TOKENS} tokens; send fewer texts")
        block = lease.memory.array(lease.take(_TOKEN.itemsize * sum(sizes)), _TOKEN, (sum(sizes),))
        block[:] = np.concatenate(made)
        texts += np.split(block, np.cumsum(sizes)[:-1])
    return texts


def pieces(given: Sequence[Any], size: Callable[[Any], int]) -> Iterator[Sequence[Any]]:
    """Divide texts, in order, into pieces of at most _TOKENIZED_TOGETHER characters, or of one text."""
    start = characters = 0
    for end, text in enumerate(given):
        if end > start and characters + size(text) > _TOKENIZED_TOGETHER:
            yield given[start:end]
            start, characters = end, 0
        characters += size(text)
    yield given[start:]


class Tokenizers:
    """By model. Belongs to the event loop's thread; files are read on others."""

    def __init__(self, repository: Path) -> None:
        self._files = ModelFiles(repository, TOKENIZER, _MOST_BYTES, _loaded)

    def state(self, model: str) -> FileState | None:
        """Return the state of a model's tokenizer; None if it has none. Reads the disk."""
        return self._files.state(model)

    async def find(self, model: str) -> LoadedTokenizer | None:
        """Return a model's current tokenizer; None if it has none. Raises Refused."""
        return await self._files.of(model)

    async def of(self, model: str) -> LoadedTokenizer:
        """Return a model's current tokenizer. Raises InvalidRequest if it has none, and Refused."""
        found = await self.find(model)
        if found is None:
            text = f"model '{model}' has no {TOKENIZER} in its folder, so it takes token ids (infer) and no text"
            raise InvalidRequest(text)
        return found


def _loaded(path: Path) -> LoadedTokenizer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores are for the models
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        text = "texts need the package tokenizers; install it with pip install 'cohabit[text]'"
        raise Refused("Unsupported", text) from error
    tokenizer = Tokenizer.from_file(str(path))
    padding = (tokenizer.padding or {}).get("pad_id")
    known = (tokenizer.token_to_id(token) for token in _PADDING)
    padding_id = padding if padding is not None else next((k for k in known if k is not None), 0)
    # Texts are padded here, to the longest of a request; texts that are too long are refused.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    loaded = LoadedTokenizer(tokenizer, padding_id)
    loaded.name(0)  # properties that take time are computed on this thread
    return loaded

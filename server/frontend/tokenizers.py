"""Tokenizers of text models: `tokenizer.json` in a model's folder, read on the model's first text."""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.file_state import FileState
from cohabit.server.frontend.memory import Lease
from cohabit.server.frontend.model_files import ModelFiles
from cohabit.server.ipc.model import TOKENIZER
from cohabit.server.protocol.embedding import MOST_TOKENS, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_BYTES = 64 << 20
_TOKEN = np.dtype(np.int32)
_PADDING = ("[PAD]", "<pad>")
_TOKENIZED_TOGETHER = 16 << 10
"""Characters tokenized in one call: others have their turns in between, and memory is bounded."""


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    tokenizer: "Tokenizer"
    padding_id: int

    def tokens(self, texts: Sequence[str], *, adds_special: bool = True) -> list[Tokens]:
        """Return the token ids of each text. Releases the GIL meanwhile, unlike `encode`.

        `adds_special` adds the special tokens that the tokenizer puts around a text.
        """
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=adds_special)
        return [np.array(one.ids, _TOKEN) for one in encoded]

    def decoder(self, prompt: Sequence[int]) -> "TextDecoder":
        """Return a decoder for the tokens after a prompt."""
        return TextDecoder(self.tokenizer, prompt)


class TextDecoder:
    """Decodes tokens that arrive one by one, as soon as they form whole characters."""

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Add a token, and return the whole characters that it completes."""
        return self._stream.step(self._tokenizer, token) or ""


async def tokens_in(
    lease: Lease,
    given: Sequence[str] | Sequence[Tokens],
    tokenize: Callable[[Sequence[str]], Awaitable[list[Tokens]]],
) -> list[Tokens]:
    """Return token ids in leased memory, of the texts or as given. Raises InvalidRequest, and Overloaded."""
    texts: list[Tokens] = []
    count = 0
    for piece in _pieces(given):
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


def _pieces(given: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Divide texts, in order, into pieces of at most _TOKENIZED_TOGETHER characters, or of one text."""
    start = characters = 0
    for end, text in enumerate(given):
        if end > start and characters + len(text) > _TOKENIZED_TOGETHER:
            yield given[start:end]
            start, characters = end, 0
        characters += len(text)
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
    return LoadedTokenizer(tokenizer, padding_id)

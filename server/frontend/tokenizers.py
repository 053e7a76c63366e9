"""Tokenizers of text models: `tokenizer.json` in a model's folder, read when the model's first text comes."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.file_state import FileState
from cohabit.server.frontend.threads import call
from cohabit.server.ipc.model import TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_BYTES = 64 << 20
_PADDING = ("[PAD]", "<pad>")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    tokenizer: "Tokenizer"
    padding_id: int


class Tokenizers:
    """By model. Belongs to the event loop's thread; files are read on others."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._loaded: dict[str, tuple[FileState, LoadedTokenizer]] = {}

    def state(self, model: str) -> FileState | None:
        """Return the state of a model's tokenizer; None if it has none. Reads the disk."""
        path = self._repository / model / TOKENIZER
        root = self._repository.resolve()
        return FileState.of(path) if path.is_file() and path.resolve().is_relative_to(root) else None

    async def of(self, model: str) -> LoadedTokenizer:
        """Return a model's tokenizer, as its file is now. Raises InvalidRequest where it has none, and Refused."""
        state = await call(True, self.state, model)
        if state is None:
            self._loaded.pop(model, None)
            text = f"model '{model}' has no {TOKENIZER} in its folder, so it takes token ids (infer) and no text"
            raise InvalidRequest(text)
        found = self._loaded.get(model)
        if found is None or found[0] != state:
            found = self._loaded[model] = state, await call(True, self._read, model, state)
        return found[1]

    def _read(self, model: str, state: FileState) -> LoadedTokenizer:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the cores are the models'
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            text = "texts need the package tokenizers; install it with pip install 'cohabit[text]'"
            raise Refused("Unsupported", text) from error
        if state.nbytes > _MOST_BYTES:
            text = f"model '{model}': its {TOKENIZER} has {state.nbytes} bytes, the limit is {_MOST_BYTES}"
            raise Refused("Unsupported", text)
        try:
            tokenizer = Tokenizer.from_file(str(self._repository / model / TOKENIZER))
        except Exception as error:  # tokenizers raises nothing more specific
            raise Refused(
                "Unsupported", f"model '{model}': its {TOKENIZER} cannot be read: {error}"[:300]
            ) from error
        padding = (tokenizer.padding or {}).get("pad_id")
        known = (tokenizer.token_to_id(token) for token in _PADDING)
        padding_id = padding if padding is not None else next((k for k in known if k is not None), 0)
        # Texts are padded here, to the longest of a request, and those that are too long are refused.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return LoadedTokenizer(tokenizer, padding_id)

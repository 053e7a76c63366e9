"""The tokenizer of a folder, as transformers reads it.

transformers completes `tokenizer.json` from the folder's other files: special tokens that only `tokenizer_config.json`
names, or lower case. The entry's file has all of this.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cohabit.server.importing.subject import reason_of
from cohabit.server.ipc.model import TOKENIZER

_CONFIG = "tokenizer_config.json"
_SAMPLES = ("Hello, World!", " a  b\n\tc ", "naïve Ünïcode 東京 😀", "3.14 <b>x</b> it's")


class FolderTokenizer:
    """Of a folder with `tokenizer.json`."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._path = folder / TOKENIZER
        self._completes = (folder / _CONFIG).is_file()
        """Whether another file completes it. If not, transformers adds tokens by the model's class, which the model
        need not have."""
        self.unread: str | None = None
        """Why transformers cannot read it."""
        self.own: Any = None
        """transformers' tokenizer; None if it cannot read it."""
        try:
            self.own = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # of many kinds, for damaged files and missing packages
            self.unread = reason_of(error)

    @staticmethod
    def of(folder: Path) -> "FolderTokenizer | None":
        return FolderTokenizer(folder) if (folder / TOKENIZER).is_file() else None

    @cached_property
    def document(self) -> bytes:
        """The contents of `tokenizer.json` for the entry."""
        backend = getattr(self.own, "backend_tokenizer", None)
        if backend is None or not self._completes:
            return self._path.read_bytes()
        return bytes(backend.to_str().encode())

    @property
    def differs(self) -> str | None:
        """A text that the server would split into other tokens than transformers; None if none is known."""
        from tokenizers import Tokenizer

        if self.own is None or not self._completes:
            return None
        served = Tokenizer.from_str(self.document.decode())
        served.no_padding()
        served.no_truncation()
        special = [str(token) for token in self.own.all_special_tokens]
        for text in [*_SAMPLES, *special, "a".join(special)]:
            if _ids(lambda t: served.encode(t).ids, text) != _ids(lambda t: self.own(t)["input_ids"], text):
                return text
        return None


def _ids(split: Callable[[str], Sequence[int]], text: str) -> list[int] | None:
    """Return the tokens of a text; None if there are none for a part of it, nor one for what is unknown."""
    try:
        return list(split(text))
    except Exception:  # the library raises no other class
        return None


def entry_tokenizer(read: FolderTokenizer | None) -> tuple[bytes | None, tuple[str, ...]]:
    """Return the contents of an entry's tokenizer file; None without one, or if texts would be split differently.

    The second result are notes about it for the user.
    """
    if read is None:
        return None, ()
    text = read.differs
    if text is not None:
        return None, (
            f"it takes token ids and no texts: its tokenizer splits {text!r} differently in transformers",
        )
    return read.document, ()

"""The tokenizer of a folder, as transformers reads it.

transformers completes `tokenizer.json` from the folder's other files: special tokens that only `tokenizer_config.json`
names, or lower case. The entry's file has all of this.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from cohabit.server.importing.subject import reason_of
from cohabit.server.ipc.model import TOKENIZER

_SAMPLES = ("Hello, World!", " a  b\n\tc ", "naïve Ünïcode 東京 😀", "3.14 <b>x</b> it's")


class FolderTokenizer:
    """Of a folder with `tokenizer.json`."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._path = folder / TOKENIZER
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
        return self._path.read_bytes() if backend is None else backend.to_str().encode()

    @property
    def differs(self) -> str | None:
        """A text that the server would split into other tokens than transformers; None if none is known."""
        from tokenizers import Tokenizer

        if self.own is None:
            return None
        served = Tokenizer.from_str(self.document.decode())
        served.no_padding()
        served.no_truncation()
        special = [str(token) for token in self.own.all_special_tokens]
        for text in [*_SAMPLES, *special, "a".join(special)]:
            if served.encode(text).ids != list(self.own(text)["input_ids"]):
                return text
        return None


def entry_tokenizer(folder: Path) -> tuple[bytes | None, tuple[str, ...]]:
    """Return the contents of an entry's tokenizer file; None without one, or if texts would be split differently.

    The second result are notes about it for the user.
    """
    read = FolderTokenizer.of(folder)
    if read is None:
        return None, ()
    text = read.differs
    if text is not None:
        return None, (
            f"it takes token ids and no texts: its tokenizer splits {text!r} differently in transformers",
        )
    return read.document, ()

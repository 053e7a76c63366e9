"""Files in model folders that front ends read: tokenizers and generation settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from cohabit.server.errors import Refused
from cohabit.server.file_state import FileState
from cohabit.server.frontend.threads import call

_T = TypeVar("_T")


class ModelFiles(Generic[_T]):
    """One file per model, parsed on first use and after each change.

    Belongs to the event loop's thread; files are read on others.
    """

    def __init__(self, repository: Path, name: str, most_bytes: int, parse: Callable[[Path], _T]) -> None:
        self._repository = repository
        self._name = name
        self._most_bytes = most_bytes
        self._parse = parse
        self._parsed: dict[str, tuple[FileState, _T]] = {}

    def state(self, model: str) -> FileState | None:
        """Return the state of a model's file; None if it has none. Reads the disk."""
        path, root = self._path(model), self._repository.resolve()
        return FileState.of(path) if path.is_file() and path.resolve().is_relative_to(root) else None

    async def of(self, model: str) -> _T | None:
        """Return the current content of a model's file; None if it has none. Raises Refused."""
        state = await call(True, self.state, model)
        if state is None:
            self._parsed.pop(model, None)
            return None
        known = self._parsed.get(model)
        if known is None or known[0] != state:
            known = self._parsed[model] = state, await call(True, self._read, model, state)
        return known[1]

    def _path(self, model: str) -> Path:
        return self._repository / model / self._name

    def _read(self, model: str, state: FileState) -> _T:
        if state.nbytes > self._most_bytes:
            text = f"model '{model}': its {self._name} has {state.nbytes} bytes, the limit is {self._most_bytes}"
            raise Refused("Unsupported", text)
        try:
            return self._parse(self._path(model))
        except Refused:
            raise
        except Exception as error:  # tokenizers raises nothing more specific
            text = f"model '{model}': its {self._name} cannot be read: {error}"[:300]
            raise Refused("Unsupported", text) from error

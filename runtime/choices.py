"""What was measured to be fastest on this machine, kept for all processes: a choice is measured once.

Later starts measure nothing known, and a model that is lowered into two caches has the same bits.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from cohabit.planner import cache_file
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import fingerprint

_TABLE: Final = "1"
"""Version of the table. It changes whenever choices are measured differently."""
_decoder = msgspec.json.Decoder(str)
_Name = TypeVar("_Name", bound=str)


def chosen(machine: str, question: Any, names: Sequence[_Name], measure: Callable[[], _Name]) -> _Name:
    """Return the name that the table of a machine has for a question, or the measured one, and add it.

    `question` is anything that msgspec encodes. If several processes measure at a time, all of them take what is
    written first. Without a place for the table, each process measures.
    """
    path = cache_file.user_folder() / "choices" / fingerprint([_TABLE, machine])[:32]
    path /= f"{fingerprint([question, names])[:32]}.json"
    with suppress(OSError, FormatError, msgspec.DecodeError, ValueError):
        return names[names.index(_decoder.decode(cache_file.read(path)))]
    found = measure()
    with suppress(OSError, FormatError, msgspec.DecodeError, ValueError):
        written = _decoder.decode(cache_file.write_first(path, msgspec.json.encode(found)))
        return names[names.index(written)]
    return found

"""Profiles of boards whose speed can be predicted before one has them, from board_profiles.json, with their sources.

A prediction scales the op times that were measured on this machine. `cohabit profile` on the board measures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cohabit.planner.profile import Profile


class BoardFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    source: str
    is_estimate: bool = False
    """Whether the source does not give the figure itself."""


class BoardProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    latency_s: BoardFigure
    """Of a read of its store."""
    bandwidth_bytes_per_s: BoardFigure
    """Of its store."""
    compute_factor: BoardFigure
    """How many times as long as on this machine an op takes there."""
    memory_bytes: BoardFigure
    name: str = ""

    @property
    def estimates(self) -> tuple[str, ...]:
        """The names of the figures that are estimates."""
        figures = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return tuple(name for name, figure in figures if isinstance(figure, BoardFigure) and figure.is_estimate)

    def scaled(self, profile: "Profile") -> "Profile":
        """Return the profile predicted for this board from one of this machine."""
        from cohabit.planner.profile import Link  # `--help` reads the boards, too, and loads nothing of the planner

        store = Link(self.latency_s.value, self.bandwidth_bytes_per_s.value)
        return msgspec.structs.replace(
            profile,
            device=f"{self.name}, scaled from a profile of {profile.device}",
            op_seconds=tuple(seconds * self.compute_factor.value for seconds in profile.op_seconds),
            swap_in=store,
            swap_out=store,
            window_bytes=0,
        )


_decoder = msgspec.json.Decoder(dict[str, BoardProfile])


def _read() -> Mapping[str, BoardProfile]:
    boards = _decoder.decode(Path(__file__).with_name("board_profiles.json").read_bytes())
    return {name: msgspec.structs.replace(board, name=name) for name, board in boards.items()}


BOARD_PROFILES = _read()

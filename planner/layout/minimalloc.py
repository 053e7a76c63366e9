"""MiniMalloc's CSV files: problems of static allocation in, offsets out, and how far those are from the bound.

The public format of github.com/google/minimalloc: a header names the columns, one buffer per line.

    id,lower,upper,size,alignment
    b1,0,3,4,1

`lower` and `upper` bound the half-open lifespan. `begin` and `start` mean `lower`; `end` is the last time at which the
buffer is needed, one less than `upper`. `alignment`, `hint`, `gaps` and `offset` may follow. A gap `6-9` is time in
which the buffer need not exist, `6-9@0:4` one in which a part of it must. The longest whole gap is used, further ones
and partial ones are not: that is safe, and costs memory. Hints and offsets are read over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import FormatError
from planner.layout.placement import Block, Layout, most_live_bytes, place
from planner.lifetimes import Lifespan

_SYNONYMS = {"begin": "lower", "start": "lower", "end": "upper", "buffer": "id", "buffer_id": "id"}
_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "hint", "gaps", "offset")


@dataclass(frozen=True, slots=True)
class Problem:
    """Buffers by name, in the file's order; times are those of the file, half-open."""

    names: tuple[str, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """A layout against the most bytes alive at once, which none can beat."""

    peak_bytes: int
    bound_bytes: int

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.bound_bytes if self.bound_bytes else 1.0


def read(path: Path) -> Problem:
    """Read a problem. Raises FormatError, naming file, line and column."""
    lines = path.read_text().splitlines()
    if not lines:
        raise FormatError(f"{path}: line 1: the file is empty; its first line names the columns")
    columns, inclusive = _columns(path, lines[0])
    names: list[str] = []
    blocks: list[Block] = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            break  # what stands behind an empty line is not read
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(columns):
            raise FormatError(f"{path}: line {number}: {len(fields)} fields, but there are {len(columns)} columns")
        row = _Row(path, number, dict(zip(columns, fields, strict=True)), inclusive)
        names.append(row.fields["id"])
        blocks.append(row.block())
    return Problem(tuple(names), tuple(blocks))


def score(blocks: Sequence[Block], nodes: int = 0) -> Score:
    """Place blocks, searching with up to `nodes` partial placements, and compare with the bound."""
    return Score(place(blocks, nodes=nodes).peak_bytes, most_live_bytes(blocks))


def write(path: Path, problem: Problem, layout: Layout | None = None) -> None:
    """Write a problem, and where its buffers are if a layout is given. A second span is written as a gap."""
    columns = ["id", "lower", "upper", "size", "alignment", "gaps", *(["offset"] if layout is not None else [])]
    lines = [",".join(columns)]
    for i, (name, block) in enumerate(zip(problem.names, problem.blocks, strict=True)):
        last = block.again or block.span
        gap = "" if block.again is None else f"{block.span.end}-{block.again.first}"
        fields = [name, block.span.first, last.end, block.nbytes, block.alignment, gap]
        lines.append(",".join(map(str, fields if layout is None else [*fields, layout.offsets[i]])))
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class _Row:
    path: Path
    number: int
    fields: dict[str, str]
    inclusive: bool
    """Whether ends are the last time that still counts."""

    def block(self) -> Block:
        lower, upper = self.integer("lower"), self.integer("upper") + self.inclusive
        size, alignment = self.integer("size"), self.integer("alignment") if "alignment" in self.fields else 1
        if not 0 <= lower < upper:
            raise self.error("upper", f"the lifespan {lower} to {upper} is empty or starts before 0")
        if size < 0:
            raise self.error("size", f"{size} is negative")
        if alignment < 1:
            raise self.error("alignment", f"{alignment} is not positive")
        gap = max((g for g in self.gaps(lower, upper)), key=lambda g: g.end - g.first, default=None)
        if gap is None:
            return Block(size, alignment, Lifespan(lower, upper))
        return Block(size, alignment, Lifespan(lower, gap.first), Lifespan(gap.end, upper))

    def gaps(self, lower: int, upper: int) -> list[Lifespan]:
        """Gaps inside the lifespan in which nothing of the buffer is needed. One that touches an end is no gap."""
        found = []
        for text in self.fields.get("gaps", "").split():
            times, _, window = text.partition("@")
            first, dash, end = times.partition("-")
            low, colon, high = window.partition(":")
            digits = [first, end, *([low, high] if window else [])]
            if not dash or (window and not colon) or not all(d.isdecimal() for d in digits):
                raise self.error("gaps", f"{text!r} is not a gap: write 6-9 or 6-9@0:4")
            gap = Lifespan(int(first), int(end) + self.inclusive)
            if not window and lower < gap.first < gap.end < upper:
                found.append(gap)
        return found

    def integer(self, column: str) -> int:
        try:
            return int(self.fields[column])
        except ValueError:
            raise self.error(column, f"{self.fields[column]!r} is not an integer") from None

    def error(self, column: str, what: str) -> FormatError:
        return FormatError(f"{self.path}: line {self.number}: column {column}: {what}")


def _columns(path: Path, header: str) -> tuple[list[str], bool]:
    """Names of the columns, synonyms replaced, and whether ends are inclusive."""
    written = [name.strip() for name in header.split(",")]
    columns = [_SYNONYMS.get(name, name) for name in written]
    for name in _REQUIRED:
        if name not in columns:
            raise FormatError(f"{path}: line 1: column {name} is missing")
    for name, column in zip(written, columns, strict=True):
        if column not in (*_REQUIRED, *_OPTIONAL):
            raise FormatError(f"{path}: line 1: column {name} is unknown")
        if columns.count(column) > 1:
            raise FormatError(f"{path}: line 1: column {name} is there twice")
    return columns, "end" in written

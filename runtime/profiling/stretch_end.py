"""What the end of a stretch costs: a resident model cut where plans that stream cut it, against the same left whole.

An end is a return to Python, the list of tensors that goes out and comes in again, the lanes' bookkeeping, and above
all code of Python's and TorchScript's that kernels have pressed out of the processor's caches meanwhile: the longer
ago Python ran, the more an end costs. So it is measured where plans have ends, before the ops that are the first to
read a parameter, with what is too short for a stretch left to Python as in a plan; and what all ends of a model
together cost is divided by their number, because that is what the simulator multiplies.

All that is some percent of a run, where the machine's speed changes by more from one run to the next. So two programs
run in turns, of which each cuts those parts of the model that the other leaves whole: how much faster one run was than
the other shows in both kinds of parts, and is taken out.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph import Graph
from runtime.binding.program import ComputeStep, Program, cut
from runtime.cpu.executor import Executor
from runtime.cpu.store import Store
from runtime.cpu.stretches import between
from runtime.lowering.lower import Lowered
from runtime.profiling.measuring import Cold, followed, repeat
from runtime.recording import Note

_MOST_PARTS = 8
_FEWEST_ENDS = 4
"""In each part, where there are two parts or more."""
_LEFT_WHOLE = 4
"""Of a part's places one in so many, the last ones, is no end in either program: then both leave the part with Python's
code equally far away."""
_EFFICIENCY = 1.2533
"""The standard error of a median is so many times a mean's."""
_DEVIATIONS = 1.4826
"""The standard deviation is so many times the median distance from the median."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive ops, and those of them before which a stretch ends where the part is cut."""

    ops: range
    ends: tuple[int, ...]


def measure_stretch(lowered: Lowered, program: Program, store: Store, executor: Executor, cold: Cold) -> float:
    """Seconds that each end adds to a run of the program that `build` made last; 0 if there is no place for one."""
    parts = parts_of(first_readers(program.graph), len(program.computes))
    if not parts:
        return 0.0
    programs = [cut(lowered, program, store, stretches(parts, turn)) for turn in (0, 1)]

    def run(turn: int) -> list[float]:
        cold()
        _, notes = followed(programs[turn], lowered.examples(program.batch), executor)
        return seconds_by_part(notes, parts)

    return end_seconds(parts, run, repeat())


def first_readers(graph: Graph) -> list[int]:
    """Ops that are the first to read some parameter: plans that stream may have to wait before each of them."""
    known: set[int] = set()
    readers = []
    for n, op in enumerate(graph.ops):
        parameters = {i for i in op.reads if graph.tensors[i].kind == "parameter"}
        if not parameters <= known:
            readers.append(n)
        known |= parameters
    return readers


def parts_of(readers: Sequence[int], ops: int) -> list[Part]:
    """Share out the possible ends evenly: to an even number of parts if there are enough, else to one."""
    places = [n for n in readers if n > 0]
    if not places:
        return []
    count = max(1, min(_MOST_PARTS, len(places) // _FEWEST_ENDS) // 2 * 2)
    share = len(places) // count
    starts = [0, *places[share : share * count : share]]
    parts = []
    for first, behind in pairwise([*starts, ops]):
        inside = [n for n in places if first < n < behind]
        parts.append(Part(range(first, behind), tuple(inside[: len(inside) - len(inside) // _LEFT_WHOLE])))
    return parts


def stretches(parts: Sequence[Part], turn: int) -> Iterator[range]:
    """The stretches of a program in which every other part is cut: the first one is in turn 0, and whole in turn 1."""
    starts = [part.ops.start for part in parts]
    ends = [n for place, part in enumerate(parts) if _is_cut(place, turn) for n in part.ends]
    return between([*starts, *ends], parts[-1].ops.stop)


def _is_cut(place: int, turn: int) -> bool:
    return place % 2 == turn


def seconds_by_part(notes: Iterable[Note], parts: Sequence[Part]) -> list[float]:
    """How long each part took, from the begin of its first step to the end of its last one."""
    steps = iter(notes)
    seconds = []
    for part in parts:
        first = last = next(steps)
        done = part.ops.start + _length(first)
        while done < part.ops.stop:
            last = next(steps)
            done += _length(last)
        seconds.append(last.end_s - first.start_s)
    return seconds


def _length(note: Note) -> int:
    assert isinstance(note.step, ComputeStep)
    return note.step.length


def end_seconds(parts: Sequence[Part], run: Callable[[int], Sequence[float]], rounds: Iterable[int]) -> float:
    """Run both turns, round by round, and return what an end costs: the median over all rounds and parts.

    `run` gives the seconds of each part in a turn. No end makes a run faster, and what does not stand out from the
    noise (is less than its own standard error) may be nothing at all: both count as 0. Plans with an end too many lose
    what that costs, while those that avoid ends without need may leave the link idle.
    """
    found: list[float] = []
    for n in rounds:
        turns = {turn: run(turn) for turn in ((0, 1) if n % 2 == 0 else (1, 0))}
        found += _differences(parts, turns[0], turns[1])
    middle = statistics.median(found)
    spread = statistics.median(abs(seconds - middle) for seconds in found)
    error = _EFFICIENCY * _DEVIATIONS * spread / len(found) ** 0.5
    return middle if middle > error else 0.0


def _differences(parts: Sequence[Part], first: Sequence[float], second: Sequence[float]) -> Iterator[float]:
    """Of a pair of runs, for each part what one of its ends cost, both taken as equally fast."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    slower = 1.0
    if (
        len(parts) > 1
    ):  # the ratio of parts cut in the first run and the one of those cut in the second: ends cancel out
        slower = (statistics.median(ratios[::2]) * statistics.median(ratios[1::2])) ** 0.5
    for place, (part, a, b) in enumerate(zip(parts, first, second, strict=True)):
        more = a / slower**0.5 - b * slower**0.5
        yield (more if _is_cut(place, 0) else -more) / len(part.ends)

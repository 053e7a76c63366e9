"""A program: one plan bound to addresses. All decisions that need no request are made beforehand."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Plan
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.calls import Call
from cohabit.runtime.binding.draft import ComputeStep, Draft, SwapStep
from cohabit.runtime.binding.offloaded import OffloadedTensor


@dataclass(frozen=True, slots=True)
class Bases:
    """Offsets of a model's regions in the arena, in bytes."""

    partition: int
    workspace: int

    def offset(self, address: Address) -> int:
        """Convert an address in the plan to an offset in the arena."""
        return address.offset + (self.partition if address.region == "partition" else self.workspace)


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Consecutive compute steps. Only the first waits for other lanes; other lanes wait only for the last."""

    first: ComputeStep
    calls: tuple[Call, ...]
    """The calls of all its steps."""
    steps: int


def call_groups(computes: Sequence[ComputeStep], copies: Iterable[SwapStep]) -> Iterator[CallGroup]:
    """Join compute steps between which no lane waits for another. Only `copies` wait for compute steps."""
    awaited, start, seen = {copy.computes_before for copy in copies}, 0, (0, 0)
    for n, step in enumerate(computes):
        waits_for = (step.swap_ins_before, step.swap_outs_before)
        if n > start and (n in awaited or waits_for != seen or step.first_reads):
            yield _call_group(computes[start:n])
            start = n
        seen = waits_for
    if computes:
        yield _call_group(computes[start:])


def _call_group(computes: Sequence[ComputeStep]) -> CallGroup:
    return CallGroup(computes[0], tuple(call for step in computes for call in step.calls), len(computes))


Contents = tuple[Hashable, ...]
"""Where each of some residents was copied from (`HostStore.source`)."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Residence:
    """A program's name, and where its residents are: each one's tensor and offset in the arena.

    Key of the executors' state. A model that moves has another one, and what is still copied to its old addresses
    belongs to the old one. The models of a family have one in common, which holds the contents of the last that ran.
    """

    name: str
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def of(name: str, residents: Sequence[SwapStep]) -> "Residence":
        """Return the only residence of this name and these places."""
        places = tuple((step.tensor, step.offset) for step in residents)
        with _finding:
            return _residences.setdefault((name, places), Residence(name, places))


_residences: WeakValueDictionary[tuple[str, tuple[tuple[int, int], ...]], Residence] = WeakValueDictionary()
_finding = Lock()

HAND_OVER_S, LEAST_BETWEEN_S = 50e-6, 250e-6
"""Seconds: cost of a copy in a separate thread, for waking it and sharing the interpreter, and computation between two
copies that hides this cost."""


@dataclass(frozen=True, slots=True)
class Program:
    """A draft bound to addresses, with all that an executor needs for one inference."""

    name: str
    """Programs of one name share residents that have the same addresses. The model's name is `graph.name`."""
    graph: Graph
    draft: Draft
    """Models of a family may share it, so its graph may have the name of another one."""
    computes: tuple[ComputeStep, ...]
    swap_ins: tuple[SwapStep, ...]
    swap_outs: tuple[SwapStep, ...]
    offloaded: tuple[OffloadedTensor, ...]
    residents: tuple[SwapStep, ...]
    """Copies of the initial residents to their addresses."""
    contents: Contents
    """What these copies bring; empty in a region without partitions, where nothing stays."""
    final_calls: tuple[Call, ...]
    """Views of results that belong to no op, created after the last compute step."""
    constants: Mapping[int, torch.Tensor]
    """Output slots that are parameters or views of them."""
    epilogue: int
    """Index of the first swap-in after the last compute step."""
    call_groups: tuple[CallGroup, ...] = field(init=False)
    residence: Residence = field(init=False)
    link_bytes: int = field(init=False)
    copies_inline: bool = field(init=False)
    """Whether the CPU's compute lane makes the copies itself, right before the op that reads them."""

    def __post_init__(self) -> None:
        inline = bool(self.computes) and not self.offloaded and self._copies_are_short()
        object.__setattr__(self, "copies_inline", inline)
        joined = call_groups(self.computes, (*self.swap_ins, *self.swap_outs))
        object.__setattr__(self, "call_groups", tuple(joined))
        link_bytes = sum(s.nbytes for s in self.swap_ins) + sum(s.nbytes for s in self.swap_outs)
        object.__setattr__(self, "link_bytes", link_bytes)
        object.__setattr__(self, "residence", Residence.of(self.name, self.residents))

    def _copies_are_short(self) -> bool:
        """Whether copies, and the ops between them, are too short to pay for a separate thread."""
        profile, count = self.draft.profile, len(self.swap_ins)
        if profile is None or not count:
            return False
        copies_s = sum(profile.swap_in_seconds(self.draft.graph.tensors[s.tensor]) for s in self.swap_ins)
        return copies_s <= HAND_OVER_S * count and profile.compute_s <= LEAST_BETWEEN_S * count

    def exchanges(self, held: Contents) -> list[SwapStep]:
        """Return the copies of the residents in whose place another model of the family has left its own."""
        if held is self.contents:
            return []
        return [s for s, own, other in zip(self.residents, self.contents, held, strict=True) if own != other]

    @property
    def bucket(self) -> Bucket:
        return self.draft.graph.bucket

    @property
    def plan(self) -> Plan:
        return self.draft.plan

    @property
    def input_slots(self) -> tuple[int, ...]:
        return self.draft.trace.input_slots

    @property
    def output_slots(self) -> tuple[int, ...]:
        return self.draft.trace.output_slots

    @property
    def last_copy_back(self) -> int:
        """Number of swap-ins up to the last that fills an offloaded tensor."""
        return max((i + 1 for i, s in enumerate(self.swap_ins) if s.offloaded is not None), default=0)

    def new_frame(self) -> list[Any]:
        """Return an empty frame for one run."""
        return [None] * self.draft.trace.slots

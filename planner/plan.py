"""Plans: every step of one inference, the lane it runs on, and the steps it waits for. Timelines: when each step ran.

Inputs, activations and scratch have no address: they are *counted*. Their sum never exceeds the plan's pool, in
which the device's allocator places them. Parameters and state have addresses outside of the pool, or none: then they
are counted, too, as in a training step.

Steps are in one total order. Each lane (compute, swap-in, swap-out) runs its steps in that order. `after` names
earlier steps (indices into `Plan.steps`) of other lanes that must end first. Since every wait points backwards, plans
cannot deadlock. Swap-ins after the last compute step form the epilogue: they restore the initial residents and do not
count towards the latency."""

from functools import cached_property
from typing import Literal

import msgspec

from cohabit.planner.graph import decode_as, fingerprint
from cohabit.planner.memory import Memory

FORMAT_VERSION = 2
"""Version 1 had an address for every activation."""

Region = Literal["partition", "workspace"]
Lane = Literal["compute", "swap_in", "swap_out"]


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A byte offset in the model's private partition or in the lane's shared workspace."""

    region: Region
    offset: int


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A resident: a parameter or state in memory when the inference starts."""

    tensor: int
    address: Address | None = None
    """None if it is counted."""


class Compute(msgspec.Struct, frozen=True, tag="compute", forbid_unknown_fields=True):
    """Run an op whose tensors are in memory."""

    op: int
    after: tuple[int, ...] = ()


class SwapIn(msgspec.Struct, frozen=True, tag="swap_in", forbid_unknown_fields=True):
    """Copy a tensor from the host store into memory."""

    tensor: int
    address: Address | None = None
    """None if the tensor is counted, as activations always are."""
    after: tuple[int, ...] = ()


class SwapOut(msgspec.Struct, frozen=True, tag="swap_out", forbid_unknown_fields=True):
    """Copy an activation or state to the host store. It stays readable until its `Drop`."""

    tensor: int
    after: tuple[int, ...] = ()


class Drop(msgspec.Struct, frozen=True, tag="drop", forbid_unknown_fields=True):
    """Release a tensor's bytes. Takes no time and no lane; the next user of the bytes must wait for their readers."""

    tensor: int


Step = Compute | SwapIn | SwapOut | Drop


def lane_of(step: Step) -> Lane | None:
    """Return the lane that a step runs on; None for a drop."""
    match step:
        case Compute():
            return "compute"
        case SwapIn():
            return "swap_in"
        case SwapOut():
            return "swap_out"
        case Drop():
            return None


Objective = Literal["latency", "period"]
"""The predicted time that a search minimises."""


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a plan was found, and its simulated times."""

    searcher: str
    seed: int
    evaluations: int
    latency_s: float
    """Predicted time of one inference on an idle device, with the initial residents in place."""
    period_s: float
    """Predicted time between inferences that run back to back."""
    baseline_s: float
    """Predicted latency of the searcher's first plan for the same memory, before any search."""
    resident_s: float
    """Time with every parameter resident: the sum of the op times."""
    bound_s: float
    """Lower bound on the latency of any plan in this memory, and so on the period, which is at least the latency."""
    objective: Objective = "latency"

    @property
    def objective_s(self) -> float:
        """The minimised time: `period_s` or `latency_s`."""
        return self.period_s if self.objective == "period" else self.latency_s

    @property
    def gap(self) -> float:
        """Relative distance of the objective to the bound; 0.02 means within 2 %."""
        return self.objective_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, weakref=True):
    """One inference of a graph in a given memory."""

    graph: str
    """Fingerprint of the graph."""
    profile: str
    """Fingerprint of the profile that the plan was evaluated with."""
    memory: Memory
    pool_bytes: int
    """Bytes at the start of the workspace for everything without an address."""
    residents: tuple[Placement, ...]
    """Parameters and state in memory both before the first and after the last step, at the same addresses."""
    steps: tuple[Step, ...]
    provenance: Provenance | None = None
    format_version: int = FORMAT_VERSION

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the plan's canonical JSON."""
        return fingerprint(self)

    @cached_property
    def pooled(self) -> frozenset[int]:
        """Tensors that are residents or swapped in without an address."""
        return frozenset(a.tensor for a in self._arrivals if a.address is None)

    @property
    def _arrivals(self) -> tuple[Placement | SwapIn, ...]:
        return *self.residents, *(step for step in self.steps if isinstance(step, SwapIn))

    @cached_property
    def epilogue_start(self) -> int:
        """Index of the first step after the last compute step."""
        computes = [i for i, step in enumerate(self.steps) if isinstance(step, Compute)]
        return computes[-1] + 1 if computes else 0


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step on its lane. Times in seconds from the start of the inference."""

    step: int
    lane: Lane
    start_s: float
    end_s: float


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All spans of one inference, in step order; simulated, or measured on a device."""

    spans: tuple[Span, ...]
    latency_s: float
    """End of the last compute step."""
    period_s: float | None
    """Time from one inference's start to the next when they run back to back; None if not determined."""
    link_bytes: int
    """Bytes copied in either direction, epilogue included."""


_decoder = msgspec.json.Decoder(Plan)


def encode(plan: Plan) -> bytes:
    return msgspec.json.encode(plan)


def decode(raw: bytes) -> Plan:
    """Decode a plan. Raises FormatError. Does not check whether it may run: see `planner.check`."""
    return decode_as(raw, _decoder, "plan", FORMAT_VERSION)

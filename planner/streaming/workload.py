"""A planning problem as arrays: uses of parameters by ops, their costs, and the memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, GraphArrays, Ints, ints
from cohabit.planner.compiled import compiled
from cohabit.planner.errors import InvalidPlan
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint, pages
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Placement
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.table import WORKSPACE
from cohabit.planner.streaming.page_map import NO_MORE, NOWHERE


class Arrays(NamedTuple):
    """Input of compiled loops. Parameters are numbered in order of first use."""

    partition_pages: int
    window_pages: int
    """The workspace without the pool; less if parameters stream through the processor's cache."""
    size: Ints
    """Pages of each parameter."""
    swap_s: Floats
    """Swap-in time of each parameter."""
    first_use: Ints
    """First op that reads each parameter; the number of ops if none does."""
    last_use: Ints
    """Last op that reads each parameter; -1 if none does."""
    op_s: Floats
    op_start_s: Floats
    """Start of each op if none ever waits, and the end of the last; shape [ops + 1]."""
    use_start: Ints
    """Op k's uses are `use_start[k]` to `use_start[k + 1]`; shape [ops + 1]."""
    use_parameter: Ints
    use_op: Ints
    use_next: Ints
    """Per use, the next op that reads the same parameter, or NO_MORE."""
    use_split: Ints
    """Per use, the parameter's page if all of the op's parameters are laid out in empty memory."""
    page_s: float
    """Time of a page on the link, without latency."""
    keeps: bool
    """Whether residents are never released, because copies to their bytes would leave the processor's cache."""


class Numbering(NamedTuple):
    """Maps the numbers of parameters and ops in `Arrays` to the graph's."""

    graph: GraphArrays
    tensor: Ints
    """Tensor id of each parameter."""
    op: Ints
    """Op id at each position; empty for a graph without ops."""
    pool_bytes: int
    """Bytes at the workspace's start for activations."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A graph to plan in a given memory."""

    footprint: Footprint
    profile: Profile
    parameters: tuple[int, ...]
    """Tensor ids: parameters that ops read, in order of first use, then residents that no op reads."""
    arrays: Arrays
    numbering: Numbering

    @staticmethod
    def of(
        footprint: Footprint,
        profile: Profile,
        memory: Memory,
        graph: GraphArrays,
        order: Sequence[int] | None = None,
        residents: Sequence[Placement] = (),
    ) -> "Workload":
        """`footprint` and `profile` have the ops in execution order; `order[k]` is the op of `graph` that runs k-th.

        Raises InfeasibleBudget if some op's parameters do not fit next to the activations.
        """
        footprint.require(memory.partition_bytes, memory.workspace_bytes)
        window_bytes = memory.workspace_bytes - footprint.activation_bytes
        cached = streams_in_cache(footprint, profile)
        if cached:
            window_bytes = min(window_bytes, profile.window_bytes)
        # Number parameters by first use, and list the uses in op order.
        tensors = footprint.graph.tensors
        read = (i for use in footprint.uses for i in use)
        parameters = tuple(dict.fromkeys((*read, *(r.tensor for r in residents))))
        number = {i: n for n, i in enumerate(parameters)}
        uses = [[number[i] for i in use] for use in footprint.uses]
        use_parameter, use_op = ints(p for op in uses for p in op), ints(k for k, op in enumerate(uses) for _ in op)
        use_next = _next_uses(uses, len(parameters))
        first_use, last_use = np.full(len(parameters), len(uses)), np.full(len(parameters), -1)
        np.minimum.at(first_use, use_parameter, use_op)
        np.maximum.at(last_use, use_parameter, use_op)
        partition_pages = memory.partition_bytes // PAGE_BYTES
        window_pages = window_bytes // PAGE_BYTES
        op_s = np.array(profile.op_seconds or [0.0])
        # A layout for each op that is certain to fit
        split = [_split(footprint, k, partition_pages, window_pages) for k in range(len(uses))]
        arrays = Arrays(
            partition_pages=partition_pages,
            window_pages=window_pages,
            size=ints(pages(tensors[i].nbytes) for i in parameters),
            swap_s=np.array([profile.swap_in_seconds(tensors[i]) for i in parameters]),
            first_use=first_use,
            last_use=last_use,
            op_s=op_s,
            op_start_s=np.concatenate([[0.0], np.cumsum(op_s)]),
            use_start=ints(np.cumsum([0, *map(len, uses)])),
            use_parameter=use_parameter,
            use_op=use_op,
            use_next=use_next,
            use_split=ints(page for op in split for page in op),
            page_s=PAGE_BYTES / profile.swap_in.bandwidth_bytes_per_s,
            keeps=cached,
        )
        numbering = Numbering(
            graph,
            ints(parameters),
            ints(range(len(footprint.graph.ops)) if order is None else order),
            footprint.activation_bytes,
        )
        return Workload(footprint, profile, parameters, arrays, numbering)

    def pages_of(self, placements: Sequence[Placement]) -> Ints:
        """Return the first pages of residents at given addresses. Raises InvalidPlan for addresses outside its
        pages."""
        number = {i: n for n, i in enumerate(self.parameters)}
        resident_at = np.full(len(self.parameters), NOWHERE, dtype=np.int64)
        for placement in placements:
            address = placement.address
            assert address is not None, "a resident of a plan with a partition"
            page, rest = divmod(address.offset, PAGE_BYTES)
            end = page + int(self.arrays.size[number[placement.tensor]])
            if rest or address.region != "partition" or not 0 <= page <= end <= self.arrays.partition_pages:
                name = self.footprint.graph.tensors[placement.tensor].name
                raise InvalidPlan(
                    [
                        f"resident {name} is at {address.region}+{address.offset}, not in one"
                        f" of the partition's {self.arrays.partition_pages} pages of {PAGE_BYTES} bytes"
                    ]
                )
            resident_at[number[placement.tensor]] = page
        return resident_at


@compiled
def offset_of(work: Arrays, numbering: Numbering, page: int) -> int:
    """Convert a page of `planner.streaming.page_map` to an offset of a schedule."""
    if page <= work.partition_pages:  # only empty parameters are at the border
        return page * PAGE_BYTES
    return WORKSPACE + numbering.pool_bytes + (page - work.partition_pages - 1) * PAGE_BYTES


def streams_in_cache(footprint: Footprint, profile: Profile) -> bool:
    """Whether the parameters of two ops fit in the processor's cache, so that copies overlap with ops there."""
    return 2 * max(footprint.op_pages) * PAGE_BYTES <= profile.window_bytes


def _next_uses(uses: list[list[int]], parameters: int) -> Ints:
    next_use = [NO_MORE] * parameters
    found: list[int] = []
    for k in reversed(range(len(uses))):
        found += (next_use[p] for p in reversed(uses[k]))
        for parameter in uses[k]:
            next_use[parameter] = k
    return ints(reversed(found))


def _split(footprint: Footprint, op: int, partition_pages: int, window_pages: int) -> list[int]:
    """Return pages for all of an op's parameters; if the window is too small, some go to the partition."""
    too_many = footprint.op_pages[op] > window_pages
    in_partition = footprint.split(op, partition_pages) if too_many else frozenset()
    top = {True: 0, False: partition_pages + 1}
    found = []
    for parameter in footprint.uses[op]:
        side = parameter in in_partition
        found.append(top[side])
        top[side] += pages(footprint.graph.tensors[parameter].nbytes)
    return found

"""A planning problem as arrays: the uses of parameters by ops, their costs, and the memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, Ints, ints
from cohabit.planner.errors import InvalidPlan
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint, pages
from cohabit.planner.plan import Address, Placement
from cohabit.planner.profile import Profile
from cohabit.planner.streaming.page_map import NO_MORE, NOWHERE


class Arrays(NamedTuple):
    """What compiled loops see. Parameters are numbered in order of first use, time is counted in ops."""

    partition_pages: int
    workspace_pages: int
    zone: Ints
    """Pages at the bottom of the workspace that hold all activations during each op, [ops]."""
    zone_so_far: Ints
    """The most that this has been by then, [ops]."""
    busy_start: Ints
    """During op k the activations take ranges `busy_start[k]` to `busy_start[k + 1]`, [ops + 1]."""
    busy: Ints
    """First and end page of each range, counted from the workspace's bottom, [ranges, 2]."""
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
    """Start of each op were nothing ever waited for, and the end of the last, [ops + 1]."""
    use_start: Ints
    """Op k's uses are `use_start[k]` to `use_start[k + 1]`, [ops + 1]."""
    use_parameter: Ints
    use_op: Ints
    use_next: Ints
    """For each use, the next op that reads the same parameter, or NO_MORE."""
    use_split: Ints
    """For each use, a page that leaves room for the op's other parameters, were memory empty."""
    compute_slowdown: float
    swap_slowdown: float
    reused: Ints
    """Uses after which the same parameter is used again."""
    page_s: float
    """Time of a page on the link, latency not counted."""
    single: bool
    """Whether this is one model's whole budget, without a shared workspace."""
    keeps: bool
    """Whether no resident is released, because copies to its bytes would leave the processor's cache."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One graph in one amount of memory."""

    footprint: Footprint
    profile: Profile
    parameters: tuple[int, ...]
    """Tensor ids of the parameters that some op reads, in order of first use, then of residents that none reads."""
    arrays: Arrays

    @staticmethod
    def of(
        footprint: Footprint,
        profile: Profile,
        partition_bytes: int,
        workspace_bytes: int,
        residents: Sequence[Placement] = (),
    ) -> "Workload":
        """Raises InfeasibleBudget if some op's parameters do not fit next to the activations.

        Without a workspace all of the partition is used like one, and residents have their homes at its top.
        """
        single = workspace_bytes == 0
        if single:
            partition_bytes, workspace_bytes = 0, partition_bytes
        footprint.require(partition_bytes, workspace_bytes)
        cached = not single and streams_in_cache(footprint, profile)
        if cached:
            workspace_bytes = min(workspace_bytes, footprint.activation_bytes + profile.window_bytes)
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
        partition_pages = partition_bytes // PAGE_BYTES
        workspace_pages = workspace_bytes // PAGE_BYTES
        op_s = np.array(profile.op_seconds or [0.0])
        split = [_split(footprint, k, partition_pages, workspace_pages) for k in range(len(uses))]
        arrays = Arrays(
            partition_pages=partition_pages,
            workspace_pages=workspace_pages,
            zone=ints(footprint.zone_pages),
            zone_so_far=np.maximum.accumulate(ints(footprint.zone_pages)),
            busy_start=ints(np.cumsum([0, *map(len, footprint.busy_pages)])),
            busy=ints(page for op in footprint.busy_pages for each in op for page in each).reshape(-1, 2),
            size=ints(pages(tensors[i].nbytes) for i in parameters),
            swap_s=np.array([profile.swap_in.seconds(tensors[i].nbytes) for i in parameters]),
            first_use=first_use,
            last_use=last_use,
            op_s=op_s,
            op_start_s=np.concatenate([[0.0], np.cumsum(op_s)]),
            use_start=ints(np.cumsum([0, *map(len, uses)])),
            use_parameter=use_parameter,
            use_op=use_op,
            use_next=use_next,
            use_split=ints(page for op in split for page in op),
            compute_slowdown=profile.compute_slowdown,
            swap_slowdown=profile.swap_slowdown,
            reused=ints(np.flatnonzero(use_next < NO_MORE)),
            page_s=PAGE_BYTES / profile.swap_in.bandwidth_bytes_per_s,
            single=single,
            keeps=cached,
        )
        return Workload(footprint, profile, parameters, arrays)

    def address(self, page: int) -> Address:
        """Where a page of `planner.streaming.page_map` lies."""
        if page <= self.arrays.partition_pages:  # at the border itself there are empty parameters at most
            return Address("partition", page * PAGE_BYTES)
        offset = (page - self.arrays.partition_pages - 1) * PAGE_BYTES
        return Address("partition" if self.arrays.single else "workspace", offset)

    @property
    def resident_pages(self) -> int:
        """Most pages of residents. In a single budget, activations may cover what has been used by then."""
        arrays = self.arrays
        return arrays.workspace_pages - int(arrays.zone[0]) if self.arrays.single else arrays.partition_pages

    def homes(self, placements: Sequence[Placement]) -> Ints:
        """Homes for residents with given addresses. Raises InvalidPlan if these are no pages of the partition."""
        number = {i: n for n, i in enumerate(self.parameters)}
        home = np.full(len(self.parameters), NOWHERE, dtype=np.int64)
        for placement in placements:
            page, rest = divmod(placement.address.offset, PAGE_BYTES)
            end = page + int(self.arrays.size[number[placement.tensor]])
            if (
                rest
                or placement.address.region != "partition"
                or not 0 <= page <= end <= self.arrays.partition_pages
            ):
                name = self.footprint.graph.tensors[placement.tensor].name
                raise InvalidPlan(
                    [
                        f"resident {name} is at {placement.address.region}+{placement.address.offset}, not in one"
                        f" of the partition's {self.arrays.partition_pages} pages of {PAGE_BYTES} bytes"
                    ]
                )
            home[number[placement.tensor]] = page
        return home


def streams_in_cache(footprint: Footprint, profile: Profile) -> bool:
    """Whether the parameters of two ops fit the processor's cache, so that copies overlap with ops there."""
    return 2 * max(footprint.op_pages) * PAGE_BYTES <= profile.window_bytes


def _next_uses(uses: list[list[int]], parameters: int) -> Ints:
    upcoming = [NO_MORE] * parameters
    found: list[int] = []
    for k in reversed(range(len(uses))):
        found += (upcoming[p] for p in reversed(uses[k]))
        for parameter in uses[k]:
            upcoming[parameter] = k
    return ints(reversed(found))


def _split(footprint: Footprint, op: int, partition_pages: int, workspace_pages: int) -> list[int]:
    """Pages for all of an op's parameters; the partition takes what it must if the window is too small."""
    zone = footprint.zone_pages[op]
    too_many = zone + footprint.op_pages[op] > workspace_pages
    in_partition = footprint.split(op, partition_pages) if too_many else frozenset()
    top = {True: 0, False: partition_pages + 1 + zone}
    found = []
    for parameter in footprint.uses[op]:
        side = parameter in in_partition
        found.append(top[side])
        top[side] += pages(footprint.graph.tensors[parameter].nbytes)
    return found

"""The least memory in which a graph can run with its activations resident, or in a zone of given size.

An op needs all its parameters at once. Each lies in one piece in the partition or in the window: what activations
leave of the workspace during that op. All sizes are in pages. A set of reachable byte counts is an integer whose bit s
says that some subset of an op's parameters takes s pages."""

from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from cohabit.planner.errors import InfeasibleBudget, format_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.layout.placement import ActivationLayout, ByteRange, joined, place_activations
from cohabit.planner.order import by_parameters, has_reuse

PAGE_BYTES = 4096


def pages(nbytes: int) -> int:
    """Pages that `nbytes` take, rounded up."""
    return -(-nbytes // PAGE_BYTES)


def page_aligned(nbytes: int) -> int:
    return pages(nbytes) * PAGE_BYTES


@dataclass(frozen=True)
class Footprint:
    """What a graph needs of memory, whatever the plan."""

    graph: Graph
    activations: ActivationLayout
    overlay: bool
    """Whether the window of each op begins where that op's activations end; otherwise, above the peak of all ops."""
    offloads: bool = False
    """Whether activations are offloaded, so that the zone is smaller than their peak."""

    @staticmethod
    def of(graph: Graph, overlay: bool = False) -> "Footprint":
        return Footprint(graph, place_activations(graph, low=overlay), overlay)

    @staticmethod
    def of_zone(graph: Graph, zone_bytes: int) -> "Footprint":
        """The footprint of a graph whose activations are offloaded to fit a zone of so many bytes."""
        busy = ((0, zone_bytes),) if zone_bytes else ()
        return Footprint(graph, ActivationLayout({}, {}, (busy,) * max(len(graph.ops), 1)), False, True)

    @cached_property
    def by_parameters(self) -> "tuple[Footprint, tuple[int, ...]] | None":
        """The same with ops that read the same parameters together, and that order; None without much to read again."""
        if self.offloads or not has_reuse(self.graph):
            return None
        order = by_parameters(self.graph)
        return Footprint.of(replace(self.graph, ops=tuple(self.graph.ops[k] for k in order)), self.overlay), order

    @property
    def activation_bytes(self) -> int:
        """Size of the activations' zone at the bottom of the workspace."""
        return page_aligned(self.activations.peak_bytes)

    @cached_property
    def zone_pages(self) -> tuple[int, ...]:
        """Pages at the bottom of the workspace that are the activations' during each op."""
        if not self.overlay:
            return (pages(self.activations.peak_bytes),) * len(self.uses)
        return tuple(pages(top) for top in self.activations.tops)

    @cached_property
    def busy_pages(self) -> tuple[tuple[ByteRange, ...], ...]:
        """Pages of the workspace that are the activations' during each op: ranges, lowest first."""
        if not self.overlay:
            return tuple(((0, zone),) if zone else () for zone in self.zone_pages)
        return tuple(
            joined((first // PAGE_BYTES, pages(end)) for first, end in ranges) for ranges in self.activations.busy
        )

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Parameters that each op reads; outputs that are parameters count as read by the last op.

        A graph without ops counts as one op that does nothing.
        """
        kinds = [t.kind for t in self.graph.tensors]
        uses = [[i for i in op.reads if kinds[i] == "parameter"] for op in self.graph.ops] or [[]]
        uses[-1] += [i for i in dict.fromkeys(self.graph.outputs) if kinds[i] == "parameter" and i not in uses[-1]]
        return tuple(tuple(u) for u in uses)

    @cached_property
    def op_pages(self) -> tuple[int, ...]:
        """Pages of parameters that each op needs at once."""
        return tuple(sum(self._page_counts(k)) for k in range(len(self.uses)))

    @cached_property
    def least_bytes(self) -> int:
        """Least partition plus workspace over all ways to split them."""
        return max(self._totals) * PAGE_BYTES

    @cached_property
    def neediest_op(self) -> str:
        """Name of the op that needs the most memory, and of the one with the most activations if they are kept free."""
        return self._described(self._totals.index(max(self._totals)))

    def _described(self, op: int) -> str:
        if not self.graph.ops:
            return "(none)"
        name = self.graph.ops[op].name
        tops = [self._own_bytes(k) for k in range(len(self.uses))] if self.offloads else self.activations.tops
        peak = tops.index(max(tops))
        if self.overlay or pages(tops[op]) == pages(tops[peak]):
            return name
        parameters, activations = self.op_pages[op] * PAGE_BYTES, self.activation_bytes
        return (
            f"{name} ({format_bytes(parameters)} of parameters), above the activations of"
            f" {self.graph.ops[peak].name} ({format_bytes(activations)}),"
        )

    def _own_bytes(self, op: int) -> int:
        """What an op needs of activations, even if all others are offloaded."""
        tensors, own = self.graph.tensors, self.graph.ops[op]
        return own.scratch_bytes + sum(tensors[i].nbytes for i in own.touched if tensors[i].kind != "parameter")

    def least_workspace_bytes(self, partition_bytes: int) -> int:
        """Least workspace that suffices with this partition."""
        return self._neediest(partition_bytes)[0] * PAGE_BYTES

    def least_partition_bytes(self, workspace_bytes: int) -> int | None:
        """Least partition that suffices with this workspace; None if the activations alone do not fit."""
        if workspace_bytes < self.activation_bytes:
            return None
        least = 0
        for k, needed in enumerate(self.op_pages):
            window = workspace_bytes // PAGE_BYTES - self.zone_pages[k]
            if needed > window:
                sums = self._sums(k) >> (needed - window)  # bit 0 is now the least that must be in the partition
                least = max(least, needed - window + (sums & -sums).bit_length() - 1)
        return least * PAGE_BYTES

    def require(self, partition_bytes: int, workspace_bytes: int) -> None:
        """Raise InfeasibleBudget, naming the least workspace for this partition, unless a plan exists."""
        least_pages, op = self._neediest(partition_bytes)
        least = least_pages * PAGE_BYTES
        if workspace_bytes < least:
            raise InfeasibleBudget(
                self.graph.name, self._described(op), partition_bytes + workspace_bytes, partition_bytes + least
            )

    def split(self, op: int, partition_pages: int) -> frozenset[int]:
        """Choose the op's parameters that go to the partition so that the window has to hold the fewest pages."""
        parameters, counts = self.uses[op], self._page_counts(op)
        prefixes = [1]
        for count in counts:
            prefixes.append(prefixes[-1] | prefixes[-1] << count)
        left = _largest_sum(prefixes[-1], partition_pages)
        chosen = []
        for parameter, count, before in zip(
            reversed(parameters), reversed(counts), reversed(prefixes[:-1]), strict=True
        ):
            if not before >> left & 1:
                chosen.append(parameter)
                left -= count
        return frozenset(chosen)

    def _neediest(self, partition_bytes: int) -> tuple[int, int]:
        """The most workspace pages that any op needs next to this partition, and that op."""
        available = partition_bytes // PAGE_BYTES
        needs = [
            zone + (needed - _largest_sum(self._sums(k), available) if needed > available else 0)
            for k, (needed, zone) in enumerate(zip(self.op_pages, self.zone_pages, strict=True))
        ]
        return max(needs), needs.index(max(needs))

    @cached_property
    def _totals(self) -> tuple[int, ...]:
        """Pages that each op needs of partition and workspace together."""
        return tuple(zone + needed for zone, needed in zip(self.zone_pages, self.op_pages, strict=True))

    def _page_counts(self, op: int) -> list[int]:
        return [pages(self.graph.tensors[i].nbytes) for i in self.uses[op]]

    def _sums(self, op: int) -> int:
        sums = 1
        for count in self._page_counts(op):
            sums |= sums << count
        return sums


def _largest_sum(sums: int, limit: int) -> int:
    """The largest reachable sum that is at most `limit`."""
    return (sums & ((1 << (limit + 1)) - 1)).bit_length() - 1

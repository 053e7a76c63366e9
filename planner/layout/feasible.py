"""Least memory in which a graph can run with its activations in a separate pool.

An op needs all its parameters at once. Each is contiguous, in the partition or in the window (the workspace without
the pool). Sizes are in pages. A set of subset sums is an integer whose bit s is set if some subset of an op's
parameters takes s pages."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from cohabit.planner.errors import InfeasibleBudget, format_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.layout.placement import activation_pool_bytes
from cohabit.planner.lifetimes import live_activation_bytes
from cohabit.planner.order import by_parameters, has_reuse

PAGE_BYTES = 4096


def pages(nbytes: int) -> int:
    """Return the number of pages for `nbytes`, rounded up."""
    return -(-nbytes // PAGE_BYTES)


def page_aligned(nbytes: int) -> int:
    return pages(nbytes) * PAGE_BYTES


@dataclass(frozen=True)
class Footprint:
    """Memory that a graph needs under every plan."""

    graph: Graph
    op_activation_bytes: tuple[int, ...]
    """Per op, bytes of activations and scratch alive while it runs; only the op's own if activations are offloaded."""
    activation_bytes: int
    """Size of the pool: whole pages."""
    offloads: bool = False
    """Whether activations are offloaded, so that the pool is smaller than their peak."""

    @staticmethod
    def of(graph: Graph) -> "Footprint":
        return Footprint(graph, live_activation_bytes(graph), page_aligned(activation_pool_bytes(graph)))

    @staticmethod
    def of_pool(graph: Graph, pool_bytes: int) -> "Footprint":
        """Return the footprint of a graph whose activations are offloaded to fit this pool."""
        own = [op.scratch_bytes + _other_bytes(graph, op.touched) for op in graph.ops] or [0]
        return Footprint(graph, tuple(own), page_aligned(pool_bytes), offloads=True)

    @cached_property
    def by_parameters(self) -> "tuple[Footprint, tuple[int, ...]] | None":
        """Footprint with ops grouped by parameters, and that order of the ops; None if ops reread few weights."""
        if self.offloads or not has_reuse(self.graph):
            return None
        order = by_parameters(self.graph)
        return Footprint.of(replace(self.graph, ops=tuple(self.graph.ops[k] for k in order))), order

    @property
    def pool_pages(self) -> int:
        return self.activation_bytes // PAGE_BYTES

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Parameters that each op reads; the last op also counts as a reader of output parameters.

        A graph without ops counts as a single no-op.
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
        """Least sum of partition and workspace over all splits."""
        return self.activation_bytes + max(self.op_pages) * PAGE_BYTES

    @cached_property
    def largest_op(self) -> str:
        """Name of the op that needs the most memory, and of the one with the most activations if that is another."""
        return self._described(self.op_pages.index(max(self.op_pages)))

    @property
    def _peak_op(self) -> int:
        """The first op with the most bytes of activations and scratch."""
        return self.op_activation_bytes.index(max(self.op_activation_bytes))

    def _described(self, op: int) -> str:
        if not self.graph.ops:
            return "(none)"
        name, alive, peak = self.graph.ops[op].name, self.op_activation_bytes, self._peak_op
        if pages(alive[op]) == pages(alive[peak]):
            return name
        parameters, activations = self.op_pages[op] * PAGE_BYTES, self.activation_bytes
        return (
            f"{name} ({format_bytes(parameters)} of parameters), above the activations of"
            f" {self.graph.ops[peak].name} ({format_bytes(activations)}),"
        )

    def least_workspace_bytes(self, partition_bytes: int) -> int:
        """Return the least sufficient workspace with this partition."""
        return self._neediest(partition_bytes)[0] * PAGE_BYTES

    def least_partition_bytes(self, workspace_bytes: int) -> int | None:
        """Return the least sufficient partition with this workspace; None if the activations alone do not fit."""
        if workspace_bytes < self.activation_bytes:
            return None
        least = 0
        for k, needed in enumerate(self.op_pages):
            window = workspace_bytes // PAGE_BYTES - self.pool_pages
            if needed > window:
                sums = self._sums(k) >> (needed - window)  # bit 0: the least pages that must be in the partition
                least = max(least, needed - window + (sums & -sums).bit_length() - 1)
        return least * PAGE_BYTES

    def require(self, partition_bytes: int, workspace_bytes: int) -> None:
        """Raise InfeasibleBudget, with the least workspace for this partition, if no plan exists."""
        least_pages, op = self._neediest(partition_bytes)
        least = least_pages * PAGE_BYTES
        if workspace_bytes < least:
            raise InfeasibleBudget(
                self.graph.name, self._described(op), partition_bytes + workspace_bytes, partition_bytes + least
            )

    def split(self, op: int, partition_pages: int) -> frozenset[int]:
        """Choose parameters of the op for the partition that leave the fewest pages to the window."""
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
        """Return the most workspace pages that any op needs with this partition, and that op.

        If the partition holds all parameters of every op, that is the op with the most activations.
        """
        available = partition_bytes // PAGE_BYTES
        needs = [
            self.pool_pages + (needed - _largest_sum(self._sums(k), available) if needed > available else 0)
            for k, needed in enumerate(self.op_pages)
        ]
        most = max(needs)
        return most, needs.index(most) if most > self.pool_pages else self._peak_op

    def _page_counts(self, op: int) -> list[int]:
        return [pages(self.graph.tensors[i].nbytes) for i in self.uses[op]]

    def _sums(self, op: int) -> int:
        sums = 1
        for count in self._page_counts(op):
            sums |= sums << count
        return sums


def _other_bytes(graph: Graph, tensors: Iterable[int]) -> int:
    """Return the bytes of the tensors that are not parameters."""
    return sum(graph.tensors[i].nbytes for i in tensors if graph.tensors[i].kind != "parameter")


def _largest_sum(sums: int, limit: int) -> int:
    """Return the largest reachable sum up to `limit`."""
    return (sums & ((1 << (limit + 1)) - 1)).bit_length() - 1

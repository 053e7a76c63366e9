"""Dry run: whether a graph's tensors fit into a pool. Torch's allocator allocates them, and no kernel runs.

Torch's pools round sizes up, keep tensors of up to 1 MiB in separate segments, and fragment. The number of such
segments is found by trial, before the model's kernels run: a kernel that gets no memory may silently choose another
algorithm, and keep it.
"""

from collections.abc import Iterator, Sequence

import torch

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Drop, Step, SwapIn
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.pools import CarvedPool
from cohabit.runtime.errors import MemoryExceeded

SMALL_SEGMENT_BYTES = 2 << 20
"""Size of torch's segments for tensors of up to 1 MiB."""
LEAST_LARGE_BYTES = 10 << 20
"""Smallest segment that torch's pools use for larger tensors."""

MOST_SMALL_SEGMENTS = 64


def fitting_pools(
    streams: Streams,
    graph: Graph,
    steps: Sequence[Step],
    memory: torch.Tensor,
    overhead_bytes: int = 0,
) -> Iterator[CarvedPool]:
    """Yield pools over `memory` that hold a graph's tensors throughout these steps.

    The pools differ in the number of segments for small tensors. The caller closes each before asking for the next.
    Each op's scratch includes `overhead_bytes` for the allocator; these are not allocated here. Raises MemoryExceeded
    if there is no pool, or no further one.
    """
    for small_segments in _divisions(memory.nbytes):
        with streams.driver.on(streams.compute):
            pool = streams.driver.pool(memory, large_bytes(memory.nbytes, small_segments))
        if fits(streams, graph, steps, pool, overhead_bytes):
            yield pool
        else:
            pool.close()
    raise MemoryExceeded(
        f"{graph.name}, batch {graph.bucket}: torch's allocator cannot place its activations and scratch in the"
        f" {format_bytes(memory.nbytes)} that the plan has for them; measure the model on this device, or give it a"
        " larger workspace"
    )


def large_bytes(nbytes: int, small_segments: int) -> int:
    """Return the size of the pool's segment for large tensors; 0 if it would be too small for the allocator."""
    left = nbytes - small_segments * SMALL_SEGMENT_BYTES
    whole = left // SMALL_SEGMENT_BYTES * SMALL_SEGMENT_BYTES
    return whole if whole >= LEAST_LARGE_BYTES else 0


def fits(
    streams: Streams,
    graph: Graph,
    steps: Sequence[Step],
    pool: CarvedPool,
    overhead_bytes: int = 0,
) -> bool:
    """Whether a pool can hold the counted tensors of these steps."""
    driver = streams.driver
    ops = {n: graph.ops[step.op] for n, step in enumerate(steps) if isinstance(step, Compute)}
    last_use = {i: n for n, op in ops.items() for i in (*op.reads, *op.writes)}
    kept = set(graph.outputs)

    def make(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=driver.device)

    with driver.on(streams.compute), driver.allocating(pool):
        try:
            held = {i: make(graph.tensors[i].nbytes) for i in graph.inputs}
            for n, step in enumerate(steps):
                if isinstance(step, Drop):
                    held.pop(step.tensor, None)
                elif isinstance(step, SwapIn) and step.address is None:
                    held[step.tensor] = make(graph.tensors[step.tensor].nbytes)
                elif isinstance(step, Compute):
                    held |= {i: make(graph.tensors[i].nbytes) for i in ops[n].writes}
                    make(ops[n].scratch_bytes - overhead_bytes)
                    done = [i for i in held if last_use.get(i, -1) <= n and i not in kept]
                    for i in done:
                        del held[i]
            held.clear()
        except torch.OutOfMemoryError:
            return False
    return pool.refused_bytes is None


def _divisions(nbytes: int) -> Iterator[int]:
    """Yield numbers of small segments to try: 1, 2, ...; last, a pool of small segments alone."""
    for small_segments in range(1, MOST_SMALL_SEGMENTS + 1):
        if large_bytes(nbytes, small_segments):
            yield small_segments
    yield nbytes // SMALL_SEGMENT_BYTES

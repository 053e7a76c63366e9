"""Measures scratch: device memory that kernels need beyond their results, and that pools waste.

Torch's allocator reports each op's peak. The waste of its pools, by rounding and fragmentation, is found by allocating
the model's tensors in ever smaller pools, and counted as scratch of every op.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from cohabit.planner.graph import Graph, aligned
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.plan import Compute
from cohabit.planner.shapes import Bucket
from cohabit.runtime.cuda.arena import CudaArena
from cohabit.runtime.cuda.commands import Command
from cohabit.runtime.cuda.issue import Streams, issue_inference
from cohabit.runtime.cuda.profiling.dry_run import LEAST_LARGE_BYTES, SMALL_SEGMENT_BYTES, fitting_pools
from cohabit.runtime.cuda.program import ALIGNMENT_BYTES, CudaProgram
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.lowering.lower import Lowered


def with_scratch(lowered: Lowered, bucket: Bucket, scratch: Sequence[int]) -> Lowered:
    """Return the model with these scratch sizes of one bucket's ops."""
    trace = lowered.traces[bucket]
    ops = tuple(
        msgspec.structs.replace(op, scratch_bytes=nbytes) for op, nbytes in zip(trace.ops, scratch, strict=True)
    )
    return replace(lowered, traces={**lowered.traces, bucket: replace(trace, ops=ops)})


def kernel_scratch(
    streams: Streams, program: CudaProgram, graph: Graph, examples: Sequence[torch.Tensor]
) -> list[int]:
    """Return each op's peak bytes beyond its results. The program swaps its parameters in op by op."""
    driver = streams.driver
    frame = program.new_frame()
    peaks = [0] * len(graph.ops)

    copy = program.performing(driver, frame)

    def perform(command: Command) -> None:
        if command.verb == "compute":
            peaks[command.index] = driver.peak_bytes(lambda: program.compute(command.index, frame))
        else:
            copy(command)

    program.buffers.fill(examples)
    with driver.allocating(program.pool):
        issue_inference(streams, program, frame, perform)
    driver.drain()
    made = [sum(aligned(graph.tensors[i].nbytes, ALIGNMENT_BYTES) for i in op.writes) for op in graph.ops]
    return [max(0, peak - results) for peak, results in zip(peaks, made, strict=True)]


def wasted_bytes(streams: Streams, graph: Graph) -> int:
    """Return the bytes that a graph needs in a pool of torch's allocator beyond its peak of tensors and scratch."""
    segment, peak = SMALL_SEGMENT_BYTES, peak_activation_bytes(graph)
    if not peak:
        return 0
    most = -(-2 * peak // segment) + 2 * LEAST_LARGE_BYTES // segment
    arena = CudaArena(streams.driver, most * segment)
    enough = bisect_left(range(most), True, 1, key=lambda n: _fits(streams, graph, arena.bytes(0, n * segment)))
    arena.close()
    # An op's scratch is tried as one tensor. It may be several, and small ones need another segment.
    return max(0, (enough + 1) * segment - peak) + 2 * ALIGNMENT_BYTES


def _fits(streams: Streams, graph: Graph, memory: torch.Tensor) -> bool:
    try:
        next(fitting_pools(streams, graph, [Compute(n) for n in range(len(graph.ops))], memory)).close()
    except MemoryExceeded:
        return False
    return True

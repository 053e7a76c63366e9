"""Fusion probes: find the convolutions for which cuDNN has a fused kernel.

A program's first run decides, with ample memory and outside captures. The decision is stored with the measurement;
requests probe nothing.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering.fused_ops import PLAIN
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.trace import Instruction

_log = logging.getLogger("cohabit.cuda")


class FusionProbe:
    """A fused op whose first call chooses between the fused kernel and plain ones."""

    def __init__(self, fused: Callable[..., torch.Tensor], tolerance: float) -> None:
        self._fused = fused
        self._tolerance = tolerance
        self._chosen: Callable[..., torch.Tensor] | None = None
        self.refused: str | None = None
        """Why the fused kernel is not used."""

    def __call__(self, *args: Any) -> torch.Tensor:
        if self._chosen is None:
            self.refused = self._obstacle(args)
            self._chosen = self._fused if self.refused is None else PLAIN[self._fused]
        return self._chosen(*args)

    def _obstacle(self, args: tuple[Any, ...]) -> str | None:
        expected = PLAIN[self._fused](*args)
        # The fused result reuses these bytes: if the kernel reads them, the result has NaNs.
        torch.full_like(expected, torch.nan)
        try:
            given = self._fused(*args)
        except RuntimeError as error:
            return str(error).split("\n", 1)[0]
        furthest = given.sub_(expected).abs_().max()
        if not bool(furthest <= self._tolerance * expected.abs_().max()):
            return f"its result is {float(furthest):.2g} away from that of the plain kernels"
        return None


def with_probes(lowered: Lowered, bucket: Bucket) -> tuple[Lowered, dict[int, FusionProbe]]:
    """Return the model with a probe in each fused op of one bucket, and the probes by op."""
    probes: dict[int, FusionProbe] = {}

    def probe(instruction: Instruction) -> Callable[..., Any]:
        assert instruction.op is not None
        probes[instruction.op] = FusionProbe(instruction.target, lowered.options.tolerance)
        return probes[instruction.op]

    fused = {i.op for i in lowered.traces[bucket].instructions if i.op is not None and i.target in PLAIN}
    return _with_targets(lowered, bucket, fused, probe), probes


def with_plain(lowered: Lowered, bucket: Bucket, refused: Collection[int]) -> Lowered:
    """Return the model with plain kernels for these fused ops of one bucket."""
    return _with_targets(lowered, bucket, refused, lambda instruction: PLAIN[instruction.target])


def refused_ops(lowered: Lowered, bucket: Bucket, probes: dict[int, FusionProbe]) -> tuple[int, ...]:
    """Return the ops without a fused kernel, and log them."""
    reasons = {op: a.refused for op, a in probes.items() if a.refused is not None}
    if reasons:
        fields = {
            "model": lowered.name,
            "batch": str(bucket),
            "plain": len(reasons),
            "fused": len(probes) - len(reasons),
            "reason": next(iter(reasons.values())),
        }
        _log.warning("convolutions without a fused kernel are computed by plain ones", extra={"fields": fields})
    return tuple(reasons)


def _with_targets(
    lowered: Lowered, bucket: Bucket, ops: Collection[int], target_of: Callable[[Instruction], Callable[..., Any]]
) -> Lowered:
    if not ops:
        return lowered
    trace = lowered.traces[bucket]
    instructions = tuple(
        replace(i, target=target_of(i)) if i.op in ops and i.target in PLAIN else i for i in trace.instructions
    )
    return replace(lowered, traces={**lowered.traces, bucket: replace(trace, instructions=instructions)})

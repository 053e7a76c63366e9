"""Rules that choose tensors by their layer: vDNN, SuperNeurons and TFLMS.

vDNN: Rhu, Gimelshein, Clemons, Zulfiqar and Keckler, "vDNN: Virtualized Deep Neural Networks for Scalable,
Memory-Efficient Neural Network Design", MICRO 2016, section III. SuperNeurons: Wang, Ye, Zhao, Wu, Li, Song, Xu and
Kraska, "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks", PPoPP 2018, section 3. TFLMS:
Le, Imai, Negishi and Kawachiya, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", arXiv 1807.02037, 2018.

Where the papers are silent: a layer is an op, and its target's name gives the kind of layer.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import numpy as np

from cohabit.planner.papers.baselines.searcher import Baseline
from cohabit.planner.schedule.gaps import Choice
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.table import COMPUTE, SWAP_IN, SWAP_OUT, Schedule

CHEAP: Final = ("pool", "elu", "silu", "swish", "sigmoid", "tanh", "softmax", "norm", "dropout")
"""Substrings of the targets of layers that SuperNeurons recomputes."""


class VdnnAll(Baseline):
    """vDNN_all: offloads the input feature maps of every layer while their last forward consumer runs.

    A layer's backward pass prefetches the inputs of the next layer that has any, and every layer waits for the copies
    issued before. The choice of convolution algorithms, and with it vDNN_dyn, is left out. Saved tensors that are not
    a layer's input, such as a dropout's mask, stay. The classifier, which the paper leaves out, is treated alike.
    """

    name = "vdnn_all"
    target = ""
    """Substring of the targets of the layers whose inputs are offloaded."""

    def _find(self) -> Iterator[Schedule | None]:
        ops = self.problem.graph.ops
        read = {t for op in ops[: self._turn] if self.target in op.target for t in op.reads}
        away = {g.tensor: g.last_use for g in self._feature_maps() if g.tensor in read}
        made = self._schedule_of(range(len(ops)), away)
        yield None if made is None else synchronised(made)


class VdnnConv(VdnnAll):
    """vDNN_conv: offloads the inputs of convolutions only."""

    name = "vdnn_conv"
    target = "conv"


def synchronised(schedule: Schedule) -> Schedule:
    """Make every op wait for all copies before the previous op, and for all swap-outs before itself."""
    computes, wait = np.flatnonzero(schedule.verb == COMPUTE), schedule.wait.copy()
    saved, fetched = (np.cumsum(schedule.verb == lane)[computes] for lane in (SWAP_OUT, SWAP_IN))
    wait[computes, SWAP_OUT] = np.maximum(wait[computes, SWAP_OUT], saved - 1)
    wait[computes[1:], SWAP_IN] = np.maximum(wait[computes[1:], SWAP_IN], fetched[:-1] - 1)
    return schedule._replace(wait=wait)


class SuperNeurons(Baseline):
    """Offloads results of convolutions; recomputes pooling, activations and normalisation.

    The tensor cache offloads only if memory is short, the least recently used first, and prefetches a layer ahead.
    Cost-aware recomputation: consecutive cheap layers are a segment. A segment no larger than the largest layer is
    recomputed once and kept for its backward pass; for a larger one, each backward op recomputes its operands. Where
    the paper is silent: all cheap layers are recomputed, and results of others, such as linear ones, stay.
    """

    name = "superneurons"

    def _find(self) -> Iterator[Schedule | None]:
        written = {
            t for op in self.problem.graph.ops[: self._turn] if VdnnConv.target in op.target for t in op.writes
        }
        maps = {g.tensor: g.last_use for g in self._feature_maps() if g.tensor in written}
        program = self._program()

        def made(count: int) -> Schedule | None:
            return self._schedule_of(program, maps, stays=[*maps][count:])

        yield made(bisect_left(range(len(maps)), True, key=lambda count: made(count) is not None))

    def _program(self) -> list[int]:
        ops, gaps, nbytes = self.problem.graph.ops, self._gaps, self.problem.arrays.nbytes
        segment: dict[int, list[int]] = {}  # per cheap op
        for k, op in enumerate(ops[: self._turn]):
            if any(name in op.target for name in CHEAP):
                segment[k] = segment.get(k - 1, [])
                segment[k].append(k)
        largest = least_bytes(self.problem.graph)
        once = {k for k, s in segment.items() if sum(nbytes[t] for j in s for t in ops[j].writes) <= largest}
        program, kept = [*range(self._turn)], set[int]()
        for p in range(self._turn, len(ops)):
            again, stack = set[int](), [p]
            while stack:
                reads = {gaps.producer.get(t, -1) for t in ops[stack.pop()].reads if t not in kept}
                wanted = {j for k in reads & segment.keys() for j in (segment[k] if k in once else [k])}
                new = [j for j in wanted - again if gaps.repeatable_until[j] >= p]
                again.update(new)
                stack += new
            kept.update(t for k in again & once for t in ops[k].writes)
            program += [*sorted(again), p]
        return program


COUNTS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of tensors that TFLMS tries to swap, besides all."""


class Tflms(Baseline):
    """Swaps the first `n` feature maps whose backward use is further away, in ops, than a threshold.

    In the paper, users set the threshold, `n` and how far ahead swap-ins are. Here every power of two is tried with
    each of COUNTS, and swap-ins are as early as memory allows.
    """

    name = "tflms"

    def _find(self) -> Iterator[Schedule | None]:
        distance = {g: g.next_use - g.last_use for g in self._feature_maps()}  # in order of their last forward use
        powers = range(max(distance.values(), default=0).bit_length(), -1, -1)
        tried = []
        for power in powers:
            far = [g for g, ops in distance.items() if ops > 1 << power]
            tried += [frozenset(far), *(frozenset(far[:count]) for count in COUNTS if count < len(far))]
        for swapped in dict.fromkeys(tried):
            yield self._schedule_of_choices(Choice.SWAP if g in swapped else Choice.KEEP for g in self._gaps.all)

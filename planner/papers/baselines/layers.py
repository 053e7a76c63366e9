"""Rules that choose tensors by their layer: vDNN, vDNN++, SuperNeurons and TFLMS.

vDNN: Rhu, Gimelshein, Clemons, Zulfiqar and Keckler, "vDNN: Virtualized Deep Neural Networks for Scalable,
Memory-Efficient Neural Network Design", MICRO 2016. vDNN++: Shriram, Garg and Kulkarni, "Dynamic Memory Management for
GPU-Based Training of Deep Neural Networks", IPDPS 2019. SuperNeurons: Wang, Ye, Zhao, Wu, Li, Song, Xu and
Kraska, "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks", PPoPP 2018, section 3. TFLMS:
Le, Imai, Negishi and Kawachiya, "TFLMS: Large Model Support in TensorFlow by Graph Rewriting", arXiv 1807.02037, 2018.

Where the papers are silent: a layer is an op, and its target's name gives the kind of layer.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from cohabit.planner.papers.baselines.searcher import Baseline
from cohabit.planner.schedule.gaps import Choice, Gap
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.table import Schedule

CONVOLUTION: Final = "conv"
"""Substring of the targets of convolutions."""
THRESHOLDS: Final = 64
"""Maximum number of thresholds that VDNN tries."""
CHEAP: Final = ("pool", "elu", "silu", "swish", "sigmoid", "tanh", "softmax", "norm", "dropout")
"""Substrings of the targets of layers that SuperNeurons recomputes."""


class Vdnn(Baseline):
    """VDNN as Beaumont, Eyraud-Dubois and Shilova compare with it (2020, section 6): offloads inputs of slow layers.

    Candidates are the inputs of layers whose forward time per byte of input is at least a threshold. For each
    threshold, either all candidates are offloaded or every second one, by a no-wait schedule. Of more than THRESHOLDS
    different thresholds, so many are tried, evenly spread over the layers.
    """

    name = "vdnn"

    def _find(self) -> Iterator[Schedule | None]:
        tried = [frozenset(chosen[::step]) for chosen in self._candidates() for step in (1, 2)]
        for away in dict.fromkeys(tried):
            yield self._schedule_of_choices(Choice.SWAP if g in away else Choice.KEEP for g in self._gaps.all)

    def _candidates(self) -> Iterator[list[Gap]]:
        """Yield the gaps of the candidates for each threshold, in forward order."""
        op_s, nbytes, maps = self.problem.profile.op_seconds, self.problem.arrays.nbytes, self._inputs()
        pace = {g: op_s[max(g.last_use, 0)] / max(int(nbytes[g.tensor]), 1) for g in maps}
        thresholds = sorted(set(pace.values()), reverse=True)
        for threshold in thresholds[:: math.ceil(len(thresholds) / THRESHOLDS) or 1]:
            yield [g for g in maps if pace[g] >= threshold]

    def _inputs(self, target: str = "") -> list[Gap]:
        """Return the gaps of inputs of the forward layers whose targets contain `target`, in forward order."""
        read = {t for op in self.problem.graph.ops[: self._turn] if target in op.target for t in op.reads}
        return [g for g in self._feature_maps() if g.tensor in read]


class VdnnConv(Vdnn):
    """vDNN++: offloads the inputs of all convolutions, or of every second one."""

    name = "vdnn_conv"

    def _candidates(self) -> Iterator[list[Gap]]:
        yield self._inputs(CONVOLUTION)


class SuperNeurons(Baseline):
    """Offloads results of convolutions; recomputes pooling, activations and normalisation.

    The tensor cache offloads only if memory is short, the least recently used first, and prefetches a layer ahead.
    Cost-aware recomputation: consecutive cheap layers are a segment. A segment no larger than the largest layer is
    recomputed once and kept for its backward pass; for a larger one, each backward op recomputes its operands. Where
    the paper is silent: all cheap layers are recomputed, and results of others, such as linear ones, stay.
    """

    name = "superneurons"

    def _find(self) -> Iterator[Schedule | None]:
        written = {t for op in self.problem.graph.ops[: self._turn] if CONVOLUTION in op.target for t in op.writes}
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

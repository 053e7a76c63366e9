"""Any graph as a chain of virtual layers: its turn from forward to backward, and the tensors its layers save.

Beaumont et al., section 6, "have slightly modified these networks to represent them as linear chains, by grouping each
non-linear part of the graph in a virtual layer". The paper does not say how. Here:

- The graph *turns* where the most bytes of activations and inputs wait between two uses. Waits for an op that changes
  a tensor in place do not count (these are gradients before an update), nor do waits over such ops only. An
  inference graph may turn, too: the decoder of a U-net uses tensors of its encoder. Without waits, all is forward.
- A virtual layer ends with every op whose results are the only earlier ones that later forward ops read. Up to
  SMALL_SHARE of the bytes between layers may bypass it, such as masks that every layer reads.
- A backward op belongs to the last forward layer that used its operands, or to the layer of the preceding backward op
  if that is earlier. Ops that change a tensor in place belong to the layer of the preceding op.
- x_i has the tensors that wait over the turn and were written by layer i - 1. If one is used longer in the forward
  phase, or sooner in the backward phase, than the model assumes, its i is larger.
- y_i is everything else that lives between two backward layers, including accumulated gradients and outputs. Extra
  memory is the difference from the bytes actually alive, so that M_peak is exact.
- Weights are not part of the chain's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.lifetimes import Lifespan, lifespans, live_bytes
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.gaps import Gap, Gaps

SMALL_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Grouped:
    """A graph's chain. `saved[i]` has the tensors of x_i."""

    chain: LayerChain
    saved: tuple[tuple[int, ...], ...]


def turn(gaps: Gaps) -> int:
    """Return the position of the first backward op; the number of ops if there is none."""
    waiting = np.zeros(len(gaps.graph.ops) + 2, np.int64)
    for gap in _waits(gaps):
        nbytes = gaps.graph.tensors[gap.tensor].nbytes
        waiting[gap.last_use + 1] += nbytes
        waiting[gap.next_use + 1] -= nbytes
    before = np.cumsum(waiting)[1 : len(gaps.graph.ops)]
    if before.max(initial=0) == 0:
        return len(gaps.graph.ops)
    return int(before.argmax()) + 1


def virtual_layers(gaps: Gaps, turn: int) -> list[int]:
    """Return the op that ends each virtual layer, including the last forward op."""
    graph = gaps.graph
    written, bypassing = np.zeros(turn + 1, np.int64), np.zeros(turn + 1, np.int64)
    for k, op in enumerate(graph.ops[:turn]):
        for t in op.writes:
            until = max((u for u in gaps.uses[t] if u < turn), default=k)
            if until > k:
                written[k] += graph.tensors[t].nbytes
                bypassing[k + 1] += graph.tensors[t].nbytes
                bypassing[until] -= graph.tensors[t].nbytes
    bypassing = np.cumsum(bypassing)
    small = SMALL_SHARE * (written + bypassing).max(initial=0)
    ends = [k for k in range(turn - 1) if written[k] and bypassing[k] <= small]
    return [*ends, turn - 1] if turn else []


def short_layers(turn: int, most: int) -> list[int]:
    """Divide the forward ops into up to `most` layers of equal numbers of ops; tensors may bypass their ends."""
    return sorted({turn * (i + 1) // most - 1 for i in range(most)} - {-1})


def grouped(gaps: Gaps, profile: Profile, turn: int, ends: Sequence[int]) -> Grouped:
    """Return the chain whose layers end with these forward ops."""
    last = len(ends)
    layer = np.searchsorted(ends, np.arange(turn)).astype(np.int64)
    layer = np.concatenate([layer, _backward_layers(gaps, layer, last)])
    saved = _saved(gaps, layer, turn, last)
    nbytes = [t.aligned_bytes for t in gaps.graph.tensors]
    x = [float(sum(nbytes[t] for t in tensors)) for tensors in saved]
    below = list(accumulate(x))  # the bytes of x_0, ..., x_i
    alive, between = _alive(gaps, nbytes)
    forward, backward = layer[:turn], layer[turn:]
    forward_most, backward_most = _most(alive[:turn], forward, last), _most(alive[turn:], backward, last)
    held_after = [int(between[turn + int((backward >= i).sum())]) for i in range(last + 1)]
    y = [max(held_after[i] - below[i], 0.0) for i in range(last + 1)]
    if last:  # x_0 may be released by then
        y[0] = max(min(float(held_after[0]), backward_most[0] - x[0]), 0.0)
    op_s = np.array(profile.op_seconds)
    chain = LayerChain(
        np.bincount(forward, op_s[:turn], last).tolist(),
        np.bincount(backward, op_s[turn:], last).tolist(),
        x,
        y,
        [max(forward_most[i] - below[i + 1], -x[i + 1]) for i in range(last)],
        [max(backward_most[i] - below[i + 1] - y[i] - y[i + 1], -x[i + 1] - y[i + 1]) for i in range(last)],
        _bytes_per_s(profile.swap_out, profile, saved, nbytes),
        _bytes_per_s(profile.swap_in, profile, saved, nbytes),
    )
    return Grouped(chain, saved)


def alive_bytes(gaps: Gaps) -> Ints:
    """Return the aligned bytes of inputs, activations and scratch during each op if nothing leaves early."""
    return _alive(gaps, [t.aligned_bytes for t in gaps.graph.tensors])[0]


def _waits(gaps: Gaps) -> list[Gap]:
    """Return gaps of inputs and activations over ops other than updates, without tensors that ops change and without
    gaps before a change."""
    graph = gaps.graph
    changed = {t for op in graph.ops for t in op.mutates}
    others = np.cumsum([0, *(not op.mutates for op in graph.ops)])
    return [
        gap
        for gap in gaps.all
        if graph.tensors[gap.tensor].kind in ("input", "activation")
        and gap.tensor not in changed
        and not graph.ops[gap.next_use].mutates
        and others[gap.next_use] > others[gap.last_use + 1]
    ]


def _backward_layers(gaps: Gaps, forward: Ints, last: int) -> Ints:
    ops, turn, at = gaps.graph.ops, len(forward), last - 1
    found = []
    for op in ops[turn:]:
        for t in op.reads if not op.mutates else ():
            used = [u for u in gaps.uses[t] if u < turn]
            at = min(at, int(forward[used[-1]])) if used else at
        found.append(at)
    return np.array(found, np.int64)


def _saved(gaps: Gaps, layer: Ints, turn: int, last: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(last + 1)]
    for gap in _waits(gaps):
        if gap.last_use < turn <= gap.next_use:
            after = 0 if gap.tensor not in gaps.producer else int(layer[gaps.producer[gap.tensor]]) + 1
            used = int(layer[gap.last_use]) if gap.last_use >= 0 else 0
            found[max(after, used, int(layer[gap.next_use]))].append(gap.tensor)
    return tuple(map(tuple, found))


def _alive(gaps: Gaps, nbytes: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the bytes during each op, and those between ops: before each op, and after the last."""
    graph, count = gaps.graph, len(gaps.graph.ops)
    during, between = list[tuple[Lifespan, int]](), list[tuple[Lifespan, int]]()
    for t, span in enumerate(lifespans(graph)):
        if span is not None and not graph.tensors[t].is_weight:
            end = span.end + (t in graph.outputs and span.end == count)
            during.append((span, nbytes[t]))
            between.append((Lifespan(span.first + 1, max(end, span.first + 1)), nbytes[t]))
    scratch = [op.aligned_scratch_bytes for op in graph.ops]
    return np.array(live_bytes(during, count + 1)[:count]) + np.array(scratch), np.array(
        live_bytes(between, count + 1)
    )


def _most(alive: Ints, layer: Ints, last: int) -> list[float]:
    most = np.zeros(last)
    np.maximum.at(most, layer, alive)
    found: list[float] = most.tolist()
    return found


def _bytes_per_s(link: Link, profile: Profile, saved: Sequence[Sequence[int]], nbytes: Sequence[int]) -> float:
    """Return the link's bandwidth while ops run, including the latency of each transfer."""
    sizes = [nbytes[t] for tensors in saved for t in tensors if nbytes[t]]
    seconds = sum(link.seconds(n) for n in sizes) * profile.swap_slowdown
    return sum(sizes) / seconds if seconds else link.bandwidth_bytes_per_s / profile.swap_slowdown

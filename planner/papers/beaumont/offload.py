"""Choice of a chain's activations to offload: GREEDY, and the cost of a choice in the relaxations of both searchers.

Beaumont, Eyraud-Dubois and Shilova, "Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training". In both
relaxations, copies can be interrupted, and memory is freed (or filled) byte by byte while they run. Activations are
offloaded in order, then prefetched in reverse order.

Equations (1) to (9) were derived again; the printed ones differ in these places:
- (6) has ex^F for the memory that the backward op needs in addition to its operands, ex^B;
- Delta_B is of x_(i-1), ..., x_0, which can arrive before B_(i-1) starts, not of x_L, ..., x_i;
- Algorithm 1 asks for room with Delta where section 5.2 has Delta+, so an idle link costs memory;
- R^B has y_(j-1) for B_j's other gradient, y_(j+1);
- the last line of (9) counts y_(L+1) in the forward phase, in which it does not exist yet.
Operands of F_i may leave while F_i runs, as in equation (3).
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from cohabit.planner.papers.beaumont.layers import LayerChain


def greedy(chain: LayerChain, memory_bytes: float) -> tuple[bool, ...]:
    """GREEDY (section 4): offload the first k activations, for the least k that covers M_peak - M_GPU bytes."""
    excess = chain.peak_bytes() - memory_bytes
    before = accumulate(chain.x_bytes[: chain.layers], initial=0.0)
    return tuple(b < excess for b, _ in zip(before, range(chain.layers), strict=False))


def whole(chain: LayerChain, offloaded: Sequence[bool]) -> tuple[float, ...]:
    """Return the offloaded bytes of each activation if the chosen ones are offloaded entirely."""
    return tuple(x * out for x, out in zip(chain.x_bytes[: chain.layers], offloaded, strict=True))


def relaxed_s(chain: LayerChain, memory_bytes: float, out_bytes: Sequence[float]) -> float:
    """Return the makespan if `out_bytes[i]` of x_i are offloaded in fractional copies; infinite if it does not fit.

    Forward ops run as early, backward ops as late as possible (section 5.2), with the wait of equation (9) between.
    """
    out_rate, in_rate = chain.offload_bytes_per_s, chain.prefetch_bytes_per_s
    idle_s = kept = to_offload = to_prefetch = 0.0  # the last two are Delta_F and Delta_B
    for i, out in enumerate(out_bytes):
        forward_room = memory_bytes - kept - chain.forward_own_bytes(i)
        backward_room = memory_bytes - kept - chain.backward_own_bytes(i)
        if min(forward_room, backward_room) < 0:
            return math.inf
        forward_wait = max(0.0, to_offload - forward_room)  # (1), in bytes
        backward_wait = max(0.0, to_prefetch - backward_room)  # (6)
        idle_s += forward_wait / out_rate + backward_wait / in_rate
        to_offload = (max(to_offload, 0.0) if out else to_offload) + out  # (2), (4)
        to_offload -= forward_wait + chain.forward_s[i] * out_rate
        to_prefetch -= backward_wait + chain.backward_s[i] * in_rate
        to_prefetch = (max(to_prefetch, 0.0) if out else to_prefetch) + out  # (7), (8)
        kept += chain.x_bytes[i] - out
    return chain.compute_s + idle_s + turn_s(chain, memory_bytes, kept, to_offload, to_prefetch)


def turn_s(chain: LayerChain, memory_bytes: float, kept: float, to_offload: float, to_prefetch: float) -> float:
    """Return the idle time between the phases (Lemma 4, equation 9)."""
    out_rate, in_rate = chain.offload_bytes_per_s, chain.prefetch_bytes_per_s
    last, x, y = chain.layers, chain.x_bytes, chain.y_bytes
    wait_s = max(0.0, to_offload / out_rate + to_prefetch / in_rate)
    if to_prefetch < 0:  # backward ops run while the rest is offloaded
        here, ran_s = x[last] + kept + max(to_offload, 0.0), 0.0
        for j in reversed(range(last)):
            if ran_s * in_rate >= -to_prefetch:
                break
            excess = here + chain.backward_extra_bytes[j] + y[j] + y[j + 1] - memory_bytes
            wait_s = max(wait_s, excess / out_rate - ran_s)
            here -= x[j + 1]
            ran_s += chain.backward_s[j]
    if to_offload < 0:  # forward ops run while the first are prefetched
        here, ran_s = x[last] + kept + max(to_prefetch, 0.0), 0.0
        for j in reversed(range(last)):
            if ran_s * out_rate >= -to_offload:
                break
            excess = here + chain.forward_extra_bytes[j] - memory_bytes
            wait_s = max(wait_s, excess / in_rate - ran_s)
            here -= x[j + 1]
            ran_s += chain.forward_s[j]
    return wait_s

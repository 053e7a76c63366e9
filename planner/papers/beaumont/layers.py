"""Beaumont's model of a training run: a chain of layers forward, the same backward, and one link (section 3.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LayerChain:
    """Layer i reads x_i and makes x_(i+1); backward, it reads x_i, x_(i+1) and y_(i+1) and makes y_i.

    L + 1 layers, numbered from 0, have L + 2 activations x and gradients y. The link makes one copy at a time. The
    paper's bandwidth beta is the same both ways; here the directions may differ.
    """

    forward_s: Sequence[float]
    """u_F"""
    backward_s: Sequence[float]
    """u_B"""
    x_bytes: Sequence[float]
    y_bytes: Sequence[float]
    forward_extra_bytes: Sequence[float]
    """ex_F: memory of a forward op in addition to x_i and x_(i+1)."""
    backward_extra_bytes: Sequence[float]
    """ex_B: memory of a backward op in addition to both x and both y. Negative if these never coexist."""
    offload_bytes_per_s: float
    prefetch_bytes_per_s: float

    @property
    def layers(self) -> int:
        return len(self.forward_s)

    @property
    def compute_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s)

    def forward_own_bytes(self, i: int) -> float:
        """Return the memory of F_i itself, without the other activations."""
        return self.x_bytes[i] + self.x_bytes[i + 1] + self.forward_extra_bytes[i]

    def backward_own_bytes(self, i: int) -> float:
        """Return the memory of B_i itself, without the other activations."""
        own = self.x_bytes[i] + self.x_bytes[i + 1] + self.y_bytes[i] + self.y_bytes[i + 1]
        return own + self.backward_extra_bytes[i]

    def peak_bytes(self) -> float:
        """Return M_peak: the memory needed if nothing is offloaded."""
        return max(self._needs(list(accumulate(self.x_bytes, initial=0.0))), default=self.x_bytes[0])

    def least_bytes(self) -> float:
        """Return the memory needed if everything possible is offloaded."""
        return max(self._needs([0.0] * (self.layers + 2)), default=self.x_bytes[0])

    def _needs(self, below: Sequence[float]) -> list[float]:
        """Return the bytes during every op if `below[i]` bytes of the activations before x_i are in memory."""
        return [
            below[i] + own(i)
            for i in range(self.layers)
            for own in (self.forward_own_bytes, self.backward_own_bytes)
        ]

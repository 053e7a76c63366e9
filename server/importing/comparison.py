"""Compares a loaded program's answers with eager PyTorch's, or with those of the runtime that a model comes from."""

import math
from collections.abc import Callable, Sequence

import torch

from cohabit.runtime.lowering.encoding.choice import cosine
from cohabit.runtime.lowering.interaction import REDUCED_TOLERANCES, TOLERANCE, comparable, difference
from cohabit.server.importing.subject import Subject, Tensors

Run = Callable[[Tensors], Sequence[torch.Tensor]]
"""Runs the loaded program, and returns its outputs in order."""
_ROUNDING = 2.0
"""If an output exceeds the tolerance, its distance from float64 counts as rounding up to this multiple of the
reference's distance."""
_MOST_ROUNDING = 1e-2
"""Maximum distance from float64 that counts as rounding, relative to the output's largest value."""


class Different(Exception):
    """An answer differs from the reference's by more than rounding. The message says by how much."""


class ReferenceComparison:
    """Compares a program's answers with the subject's reference, and with float64 if they differ by more than the
    tolerance."""

    def __init__(self, subject: Subject, run: Run, outputs: Sequence[str], tolerance: float | None = None) -> None:
        """`outputs` are the outputs' names. The default tolerance is the rounding of the module's parameter types."""
        self._subject, self._run, self._outputs = subject, run, outputs
        self.tolerance = _usual_tolerance(subject) if tolerance is None else tolerance
        self.rounded: list[str] = []
        """Notes about differences over the tolerance that are rounding."""
        self.cosines: list[float] = []
        """Between each float output and the reference's."""

    def largest_error(self, inputs: Tensors, where: str) -> float:
        """Return the largest difference of an output from the reference's.

        Raises Different if it exceeds the tolerance and is not rounding; `where` ends the message's first clause.
        """
        # The module may change its inputs.
        expected = self._subject.expected({name: tensor.clone() for name, tensor in inputs.items()})
        largest = 0.0
        for index, (name, found, tensor) in enumerate(zip(self._outputs, self._run(inputs), expected, strict=True)):
            own, other = comparable(found), comparable(tensor)
            error = difference(own, other, other) if own.shape == other.shape else math.inf
            if own.is_floating_point() and own.shape == other.shape:
                self.cosines.append(cosine(own, other))
            if not error <= self.tolerance:
                unit = "largest value" if own.is_floating_point() else "elements"
                other_name = self._subject.compared_with
                said = f"output {name} differs from {other_name}'s by {error:.2g} of its {unit} {where}"
                self._require_rounding(said, own, other, inputs, index)
            largest = max(largest, error)
        return largest

    def _require_rounding(
        self, said: str, own: torch.Tensor, other: torch.Tensor, inputs: Tensors, index: int
    ) -> None:
        """Note a difference over the tolerance, or raise Different unless the reference rounds as coarsely."""
        answer = self._subject.float64_answer(inputs) if own.shape == other.shape else None
        if answer is None:
            raise Different(said)
        exact = comparable(answer[index])
        ours, others = difference(own, exact, exact), difference(other, exact, exact)
        apart = f"from float64 it differs by {ours:.2g}, {self._subject.compared_with} by {others:.2g}"
        if not ours <= min(_ROUNDING * others, _MOST_ROUNDING):
            raise Different(f"{said}; {apart}")
        self.rounded.append(f"{said}: {apart}, so that is rounding, which this model amplifies")


def _usual_tolerance(subject: Subject) -> float:
    dtypes = {tensor.dtype for tensor in subject.module.state_dict().values()}
    return max((REDUCED_TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes), default=TOLERANCE)


def varied(example: Tensors) -> Tensors:
    """Return other inputs of an example's shapes: seeded noise, the example's integers in another order, and padding.

    Flags and integers of 0 and 1 may be masks: the first elements of each row keep the value of the example's first.
    """
    generator = torch.Generator().manual_seed(0)
    return {name: _varied(tensor, generator) for name, tensor in example.items()}


def _varied(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    if tensor.dim() < 2 or not bool(((tensor == 0) | (tensor == 1)).all()) or not tensor.numel():
        return tensor.flatten().roll(1).view(tensor.shape)
    kept = 1 + torch.randint(0, tensor.shape[-1], (*tensor.shape[:-1], 1), generator=generator)
    first = tensor.flatten()[0].bool()
    return (first ^ (torch.arange(tensor.shape[-1]) >= kept)).to(tensor.dtype)

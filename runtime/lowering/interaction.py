"""Tries whether the rows of a batch influence one another in a lowered program.

A request may be padded, or batched with others, only if rows are independent. `rows.proof` shows that for the exported
program. Here the rewritten one is run: the same rows in other batch sizes, and among neighbours of special values.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from cohabit.runtime.lowering.model import FxModel, Port

TOLERANCE = 1e-4
"""Largest difference that counts as rounding, as a fraction of the output's largest element: the tolerance against
eager PyTorch. Of integers, this fraction of the elements may differ. Kernels round differently per batch size."""
REDUCED_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""`TOLERANCE` of models that compute in these types anywhere."""

_RANDOM: tuple[tuple[int, Callable[..., torch.Tensor]], ...] = (
    *((bound, torch.randn) for bound in (1000, 100, 10, 2)),
    *((bound, torch.rand) for bound in (2, 1)),
)
"""Bounds of random integers and distributions of floats, in the order tried: a model's indices must be valid, and its
results finite. The last entry matches the inputs of the trace."""

_LEAST_COMPANY = 3
"""Smallest batch in which a row has neighbours on both sides."""
_HUGE = 1e30

_Tensors = list[torch.Tensor]
Run = Callable[[int, _Tensors], _Tensors]
"""Runs a model on inputs of a batch size. May change the inputs."""


def find_interaction(model: FxModel, batches: Sequence[int], symbols: Mapping[str, int], run: Run) -> str | None:
    """Return how rows influence one another in batches of these sizes, or None if no trial shows it.

    Dynamic dimensions have the sizes that `symbols` give. Runs the model once at each size, and a few times at a small
    one: a row's bits must be the same among all neighbours. In another batch size they may differ by rounding.
    """
    most = max(batches)
    if model.max_batch is None or most == 1:
        return None
    reference = _reference(model, run, most, symbols)
    if reference is None:
        return "the program takes no random rows"
    rows, expected = reference
    tolerance = tolerance_of(model)
    for batch in [b for b in batches if b < most] or [most - 1]:
        order = list(range(batch))[::-1]
        results = _try(model, run, [t[order] for t in rows])
        if results is None:
            return f"the program fails for a row in a batch of {batch} instead of {most}"
        wanted = [t[order] for t in expected]
        if (different := _difference(model.outputs, results, wanted, expected, tolerance)) is not None:
            return f"{different} in a batch of {batch} instead of {most}"
    few = min([b for b in batches if b >= _LEAST_COMPANY], default=most)
    return _among_special_neighbours(model, run, [t[:few] for t in rows])


def _among_special_neighbours(model: FxModel, run: Run, rows: _Tensors) -> str | None:
    """Compare a row's results among random neighbours with those among each kind of special ones."""
    few = len(rows[0])
    place = few // 2
    ordinary = _try(model, run, rows)
    for name, neighbours in _SPECIAL.items():
        # If the model rejects such a batch, the server runs its requests one by one.
        results = _try(model, run, [_surrounded(t, place, neighbours) for t in rows])
        if ordinary is None or results is None:
            continue
        own, wanted = ([t[place : place + 1] for t in tensors] for tensors in (results, ordinary))
        if (different := _difference(model.outputs, own, wanted, ordinary, 0.0)) is not None:
            return f"{different} among {name}"
    return None


_SPECIAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copies of the row": lambda rows, row: row.expand_as(rows),
    "rows of zeros": lambda rows, row: torch.zeros_like(rows),
    "rows of ones": lambda rows, row: torch.ones_like(rows),
    "rows of the largest numbers": lambda rows, row: torch.full_like(
        rows, _HUGE if rows.is_floating_point() else int(rows.max()) if rows.numel() else 0
    ),
    "rows of NaN": lambda rows, row: torch.full_like(rows, torch.nan) if rows.is_floating_point() else rows,
}
"""Neighbours, given all rows and the one that is compared."""


def _surrounded(
    rows: torch.Tensor, place: int, neighbours: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    changed = neighbours(rows, rows[place : place + 1]).clone()
    changed[place] = rows[place]
    return changed


def _reference(
    model: FxModel, run: Run, batch: int, symbols: Mapping[str, int]
) -> tuple[_Tensors, _Tensors] | None:
    """Return random rows that the model accepts, and its results: those with the most finite elements.

    None if the model accepts none.
    """
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[float, _Tensors, _Tensors]] = []
    for bound, floats in _RANDOM:
        rows = [_random_rows(p.dtype, p.at(batch, symbols), bound, floats, generator) for p in model.inputs]
        results = _try(model, run, rows)
        if results is not None:
            finite = sum(float(t.isfinite().double().mean()) for t in results if t.numel())
            found.append((finite, rows, results))
            if all(bool(t.isfinite().all()) for t in results):
                break
    if not found:
        return None
    _, rows, results = max(found, key=lambda item: item[0])
    return rows, results


def _random_rows(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    bound: int,
    floats: Callable[..., torch.Tensor],
    generator: torch.Generator,
) -> torch.Tensor:
    """Return at least two float32 or int64 rows. The last repeats one token: one expert then gets all of its tokens."""
    if dtype.is_floating_point or dtype.is_complex:
        rows = floats(shape, generator=generator)
        if len(shape) > 2:
            rows[-1] = rows[-1, :1].clone()
        return rows
    most = min(bound, 2 if dtype is torch.bool else torch.iinfo(dtype).max)
    rows = torch.randint(0, most, shape, generator=generator)
    other = rows[-2, :1] if len(shape) > 1 else rows[-2]
    rows[-1] = (other + 1) % most  # the model may accept few values, and the rows must differ
    return rows


def _try(model: FxModel, run: Run, rows: _Tensors) -> _Tensors | None:
    """Return the results in `comparable` types, or None if the model rejects the rows."""
    try:
        inputs = [t.to(port.dtype, copy=True) for port, t in zip(model.inputs, rows, strict=True)]
        return [comparable(t) for t in run(len(rows[0]), inputs)]
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return None


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float64 or int64, whose rows can be selected and compared."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).double()
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _difference(
    ports: Sequence[Port], found: _Tensors, wanted: _Tensors, reference: _Tensors, tolerance: float
) -> str | None:
    """Describe the first output that differs by more than the tolerance; None if all agree."""
    for port, own, other, whole in zip(ports, found, wanted, reference, strict=True):
        if (share := difference(own, other, whole)) > tolerance:
            unit = "of the largest element" if own.is_floating_point() else "of its elements"
            by = f" by {share:.2g} {unit}" if math.isfinite(share) else ""
            return f"output {port.name} of a row differs{by}"
    return None


def difference(own: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the largest difference relative to the largest element of `whole`; of integers, the differing fraction.

    The tensors are `comparable`.
    """
    same = (own == other) | (own != own) & (other != other)
    if bool(same.all()):
        return 0.0
    if not own.is_floating_point():
        return 1.0 - float(same.double().mean())
    finite = whole[whole.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    apart = float(torch.where(same, 0.0, (own - other).abs()).nan_to_num(nan=torch.inf).max())
    return apart / scale if scale else math.inf


def tolerance_of(model: FxModel) -> float:
    """Return the tolerance for the coarsest type that the model computes in."""
    values = [node.meta.get("val") for node in model.graph.nodes]
    dtypes = {t.dtype for t in (*values, *model.weights.values()) if isinstance(t, torch.Tensor)}
    return max([REDUCED_TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes], default=TOLERANCE)

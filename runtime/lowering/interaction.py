"""Finds by trial whether the rows of a batch influence one another.

Only where they do not may a request be padded, or batched with others. The same rows are run at other positions, batch
sizes and with other neighbours, and their results compared. Neighbours of NaN show float influences of any size.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from cohabit.runtime.lowering.model import FxModel, Port

TOLERANCE = 1e-4
"""Largest difference that counts as rounding, as a share of the output's largest element: that of outputs from eager
PyTorch's. Kernels round differently in different batches. Of integers, this share of the elements may differ."""
REDUCED_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The same for models that compute in these types anywhere."""

_RANDOM: tuple[tuple[int, Callable[..., torch.Tensor]], ...] = (
    *((bound, torch.randn) for bound in (1000, 100, 10, 2)),
    *((bound, torch.rand) for bound in (2, 1)),
)
"""Bounds of random integers, and distributions of floats, in the order in which they are tried: a model's indices must
be valid, and its results finite. It was traced with the last ones."""

_LEAST_COMPANY = 3
"""Rows of a batch in which one is among others on both sides."""

_Tensors = list[torch.Tensor]
Run = Callable[[int, _Tensors], _Tensors]
"""Runs a model on inputs of a batch size, which it may change."""


def find_interaction(model: FxModel, batches: Sequence[int], symbols: Mapping[str, int], run: Run) -> str | None:
    """Say how rows influence one another in batches of these sizes, or return None if no trial shows it.

    Dynamic dimensions have the sizes that `symbols` give. Random operators count as influence. Runs the model two or
    three times at the largest size, once at smaller ones, and once at a small one. Not found are influences that only
    special values cause.
    """
    most = max(batches)
    if model.max_batch is None or most == 1:
        return None
    reference = _reference(model, run, most, symbols)
    if reference is None:
        return "the program takes no random rows"
    rows, expected = reference
    tolerance = tolerance_of(model)
    for where, order in _trials(batches):
        results = _try(model, run, [t[order] for t in rows])
        if results is None:
            return f"the program fails for a row {where}"
        wanted = [t[order] for t in expected]
        if (different := _difference(model.outputs, results, wanted, expected, tolerance)) is not None:
            return f"{different} {where}"
    few = min([b for b in batches if b >= _LEAST_COMPANY], default=most)
    place = few // 2
    company = [_without_numbers(t[:few], place) for t in rows]
    results = _try(model, run, company) if any(t.is_floating_point() for t in rows) else None
    if results is None:  # such a batch fails in the server, too, and its requests are then executed one by one
        return None
    own, wanted = ([t[place : place + 1] for t in tensors] for tensors in (results, expected))
    different = _difference(model.outputs, own, wanted, expected, tolerance)
    return None if different is None else f"{different} among rows of NaN"


def _trials(batches: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return what is tried: the rows that a batch has, by their places in the reference."""
    most = max(batches)
    smaller = [b for b in batches if b < most] or [most - 1]
    trials = [("among copies of the row", [most - 1] * most)]
    trials += [(f"in a batch of {b} instead of {most}", list(range(b))[::-1]) for b in smaller]
    if max(smaller) == 1:  # only one row has been at another place
        trials.append(("at another place of the batch", list(range(most))[::-1]))
    return trials


def _without_numbers(rows: torch.Tensor, place: int) -> torch.Tensor:
    """Return the rows with floats other than one row's replaced by NaN."""
    if not rows.is_floating_point():
        return rows
    company = torch.full_like(rows, torch.nan)
    company[place] = rows[place]
    return company


def _reference(
    model: FxModel, run: Run, batch: int, symbols: Mapping[str, int]
) -> tuple[_Tensors, _Tensors] | None:
    """Return random rows that the model takes, and its results: those with the most finite elements.

    None if it takes none.
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
    """Return float32 or int64 rows, at least two. The last one is one token, repeated: an expert gets all of them."""
    if dtype.is_floating_point or dtype.is_complex:
        rows = floats(shape, generator=generator)
        if len(shape) > 2:
            rows[-1] = rows[-1, :1].clone()
        return rows
    most = min(bound, 2 if dtype is torch.bool else torch.iinfo(dtype).max)
    rows = torch.randint(0, most, shape, generator=generator)
    other = rows[-2, :1] if len(shape) > 1 else rows[-2]
    rows[-1] = (other + 1) % most  # few values may be all that a model takes, and the rows must differ
    return rows


def _try(model: FxModel, run: Run, rows: _Tensors) -> _Tensors | None:
    """Return the results in types whose rows can be selected and compared, or None if the model refuses the rows."""
    try:
        inputs = [t.to(port.dtype, copy=True) for port, t in zip(model.inputs, rows, strict=True)]
        return [comparable(t) for t in run(len(rows[0]), inputs)]
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return None


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return float64 or int64, of which rows can be selected and compared."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).double()
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _difference(
    ports: Sequence[Port], found: _Tensors, wanted: _Tensors, reference: _Tensors, tolerance: float
) -> str | None:
    """Say which output differs by more than the tolerance, and by how much."""
    for port, own, other, whole in zip(ports, found, wanted, reference, strict=True):
        if (share := difference(own, other, whole)) > tolerance:
            unit = "of the largest element" if own.is_floating_point() else "of its elements"
            by = f" by {share:.2g} {unit}" if math.isfinite(share) else ""
            return f"output {port.name} of a row differs{by}"
    return None


def difference(own: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest element of `whole`; of integers, the share that differs.

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

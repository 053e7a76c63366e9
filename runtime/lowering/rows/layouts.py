"""Layouts: where a tensor has the rows of a batch, and which element depends on which row.

Sizes are integers: the batch is `BATCH`, a prime larger than any factor of other sizes. So a dimension has the batch if
`BATCH` divides its size, and the factors before and after it follow from products of sizes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

BATCH = 1_000_003
_SMALL_BATCHES = (2, 3)
"""Batches at which a size must be the same multiple of the batch: `Max(batch, 8)` is not."""


class Mixing(Exception):
    """A call makes a row's result depend on other rows, on the row's place, or on the batch size."""


class NoRule(Mixing):
    """No rule describes a call. It may mix rows."""


@dataclass(frozen=True, slots=True)
class Constant:
    """No element depends on a row, and no size on the batch."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimension `dim` has size outer * batch * inner. Element (o, b, i) depends on row b, not on the number b."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class Repeated:
    """All elements along dimension `dim`, a multiple of the batch, are equal. None depends on a row."""

    dim: int


@dataclass(frozen=True, slots=True)
class RowNumber:
    """Dimension `dim` has size outer * batch * inner. Element (o, b, i) is `step` * b, a row's place."""

    dim: int
    outer: int = 1
    inner: int = 1
    step: int = 1


@dataclass(frozen=True, slots=True)
class Ordinal:
    """Element k along dimension `dim`, which has several elements per row, is `step` * k: a place, as an index."""

    dim: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Mixed:
    """Elements may depend on several rows, on a row's place, or on the batch size."""

    reason: str
    at: str = ""
    """The op that mixes, and its source line."""

    def __str__(self) -> str:
        return f"{self.at}: {self.reason}" if self.at else self.reason


Layout = Constant | Rows | Repeated | RowNumber | Ordinal | Mixed
CONSTANT = Constant()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a program, with its sizes at `BATCH`."""

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def unmixed(self) -> Constant | Rows | Repeated | RowNumber | Ordinal:
        """The layout. Raises Mixing if it is `Mixed`."""
        if isinstance(self.layout, Mixed):
            raise Mixing(self.layout.reason)
        return self.layout

    @property
    def rows(self) -> Constant | Rows | Repeated:
        """The layout, if the elements may be computed with. Raises Mixing."""
        if isinstance(self.layout, RowNumber | Ordinal):
            raise Mixing("the row's place in the batch is used as a number")
        if isinstance(self.layout, Mixed):
            raise Mixing(self.layout.reason)
        return self.layout


def checked(layout: Layout, shape: Sequence[int]) -> Layout:
    """Return the layout of a result, `Mixed` if its shape is not as the layout says."""
    found = [dim for dim, size in enumerate(shape) if size and size % BATCH == 0]
    if isinstance(layout, Mixed):
        return layout
    expected = [] if isinstance(layout, Constant) else [layout.dim]
    sized = not isinstance(layout, Rows | RowNumber) or (
        layout.dim < len(shape) and shape[layout.dim] == layout.outer * BATCH * layout.inner
    )
    return layout if found == expected and sized else Mixed("its result has the batch elsewhere than its rows")


def moved(layout: Constant | Rows | Repeated, dim: int) -> Constant | Rows | Repeated:
    return layout if isinstance(layout, Constant) else replace(layout, dim=dim)


def joined(layouts: Iterable[Constant | Rows | Repeated]) -> Constant | Rows | Repeated:
    """Return the layout of a result whose element along the batch depends on the same element of each operand."""
    kept = {layout for layout in layouts if not isinstance(layout, Constant)}
    rows = [layout for layout in kept if isinstance(layout, Rows)]
    dims = {layout.dim for layout in kept}
    if len(rows) > 1 or len(dims) > 1:
        raise Mixing("rows meet other rows")
    return rows[0] if rows else Repeated(dims.pop()) if dims else CONSTANT


def broadcast(values: Iterable[Value], rank: int) -> Constant | Rows | Repeated:
    """Return the layout of operands that are broadcast, aligned at their last dimension."""
    layouts = [(value.rows, rank - value.rank) for value in values]
    return joined(moved(v, v.dim + more) if not isinstance(v, Constant) else v for v, more in layouts)


def apart(value: Value, dims: Iterable[int], why: str) -> Constant | Rows | Repeated:
    """Return the layout of an operand whose `dims` are computed together. Raises Mixing if they include the batch."""
    layout = value.rows
    if not isinstance(layout, Constant) and layout.dim in {dim % max(1, value.rank) for dim in dims}:
        raise Mixing(why)
    return layout


def reshaped(layout: Layout, before: Sequence[int], after: Sequence[int]) -> Layout:
    """Return the layout of the same elements in another shape. Raises Mixing if a dimension has parts of rows."""
    match layout:
        case Rows(dim, outer, inner):
            return _located(dim, outer, inner, before, after)
        case RowNumber(dim, outer, inner, step):
            at = _located(dim, outer, inner, before, after)
            return RowNumber(at.dim, at.outer, at.inner, step)
        case Repeated(dim):
            factor = before[dim] // BATCH
            for inner in (n for n in range(factor, 0, -1) if factor % n == 0):
                try:
                    found = _located(dim, factor // inner, inner, before, after)
                except Mixing:
                    continue
                left, right = prod(after[: found.dim]), prod(after[found.dim + 1 :])
                whole = left % prod(before[:dim]) == 0 and right % prod(before[dim + 1 :]) == 0
                return Repeated(found.dim) if whole else found
            raise Mixing("a reshape splits rows")
        case Ordinal():
            if [size for size in before if size != 1] != [size for size in after if size != 1]:
                raise Mixing("a reshape of places in the batch")
            return replace(layout, dim=next(dim for dim, size in enumerate(after) if size % BATCH == 0))
    return layout


def _located(dim: int, outer: int, inner: int, before: Sequence[int], after: Sequence[int]) -> Rows:
    found = [n for n, size in enumerate(after) if size and size % BATCH == 0]
    if len(found) != 1:
        raise Mixing("a reshape joins the batch with itself")
    (new,) = found
    if 0 in before:
        return Rows(new, 1, after[new] // BATCH)
    lead, trail = prod(before[:dim]) * outer, prod(before[dim + 1 :]) * inner
    left, right = prod(after[:new]), prod(after[new + 1 :])
    if lead % left or trail % right or after[new] != lead // left * BATCH * (trail // right):
        raise Mixing("a reshape splits rows")
    return Rows(new, lead // left, trail // right)


class Sizes:
    """Evaluates sizes and numbers at `BATCH`, with given values of the other symbols."""

    def __init__(self, batch: str, others: Mapping[str, int]) -> None:
        self._batch, self._others = batch, others
        self._known: dict[Any, int | float] = {}
        self.mixed: set[str] = set()
        """Symbols of numbers that were read from rows."""

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return a shape. Raises Mixing for sizes that are not multiples of the batch, and depend on it."""
        return tuple(self._size(size) for size in tensor.shape)

    def _size(self, size: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        if expression not in self._known:
            at_batch = self._at(expression, BATCH)
            if self.has_batch(size) and any(
                self._at(expression, n) * BATCH != at_batch * n for n in _SMALL_BATCHES
            ):
                raise Mixing(f"a size is {expression}, which is not a multiple of the batch")
            self._known[expression] = at_batch
        return int(self._known[expression])

    def number(self, number: Any) -> Any:
        """Return a number or size that a call is given; None for one that depends on more than sizes."""
        if not isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
            return number
        try:
            return self._at(number.node.expr, BATCH)
        except Mixing:
            return None

    def has_batch(self, number: Any) -> bool:
        return any(str(symbol) == self._batch for symbol in _symbols(number))

    def has_rows(self, number: Any) -> bool:
        """Whether a number was read from a tensor that depends on rows."""
        return not self.mixed.isdisjoint(map(str, _symbols(number)))

    def _at(self, expression: Any, batch: int) -> int | float:
        values = {}
        for symbol in expression.free_symbols:
            value = batch if str(symbol) == self._batch else self._others.get(str(symbol))
            if value is None:
                raise Mixing("a size depends on values")
            values[symbol] = sympy.Integer(value)
        found = expression.xreplace(values)
        if found in (sympy.true, sympy.false):
            return int(found == sympy.true)
        return int(found) if found.is_Integer else float(found)


def _symbols(number: Any) -> Iterable[Any]:
    if not isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        return ()
    symbols: Iterable[Any] = number.node.expr.free_symbols
    return symbols

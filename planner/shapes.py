"""Buckets of input shapes, each with its own plan, and sizes that depend on dynamic dimensions."""

import ast
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from cohabit.planner.errors import CohabitError

LEAST_BUCKET = 16
"""Smallest bucket size by default: smaller sizes save little time."""
_MOST_CHARACTERS, _LARGEST_EXPONENT, _LARGEST = 1000, 8, 1 << 63


class Bucket(NamedTuple):
    """The shapes that one plan covers: a batch size, and the largest size of each other dynamic dimension.

    Buckets are ordered by batch, then by sizes.
    """

    batch: int
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "x".join(map(str, (self.batch, *self.sizes)))


class UnknownExpression(CohabitError):
    """An expression of sizes has unknown names or syntax, or exceeds a limit."""


class Dimension(msgspec.Struct, frozen=True):
    """A dynamic dimension other than the batch. Other sizes are expressions in its symbol."""

    symbol: str
    input: int
    """Index of an input with this dimension."""
    axis: int
    """Axis of that input, counting the batch."""
    step: int
    """The size is `step` times the symbol plus `offset`."""
    offset: int
    least: int
    most: int | None
    """`least` to `most` are the sizes that the model was exported for; None if there is no maximum."""
    buckets: tuple[int, ...] = ()
    """Sizes with plans, ascending."""

    def allows(self, size: int) -> bool:
        """Whether requests may have this size: the model was exported for it, and a bucket holds it."""
        return self.least <= size <= self.buckets[-1] and (size - self.offset) % self.step == 0

    def symbol_value(self, size: int) -> int:
        return (size - self.offset) // self.step

    @property
    def range(self) -> str:
        """Allowed sizes as text for messages."""
        steps = f" in steps of {self.step}" if self.step > 1 else ""
        return f"{self.least} to {self.buckets[-1]}{steps}"


class ShapeBuckets(msgspec.Struct, frozen=True):
    """Sizes of dynamic dimensions to plan for. `str()` of it is a valid value of `--shape-buckets`."""

    sizes: tuple[int, ...] = ()
    """For every dimension not in `own`; () for the default."""
    own: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """By INPUT.AXIS, or by INPUT for all dynamic dimensions of an input."""

    def of(self, name: str, axis: int) -> tuple[int, ...]:
        """Return the sizes of a dimension of an input; () for the default."""
        own = dict(self.own)
        return own.get(f"{name}.{axis}") or own.get(name) or self.sizes

    def __str__(self) -> str:
        named = [f"{name}={','.join(map(str, sizes))}" for name, sizes in self.own]
        return ";".join([*([",".join(map(str, self.sizes))] if self.sizes else []), *named])


DEFAULT_BUCKETS = ShapeBuckets()


class DynamicShape(msgspec.Struct, frozen=True):
    """The dynamic dimensions of a model other than the batch, and conditions on their symbols."""

    dimensions: tuple[Dimension, ...] = ()
    constraints: tuple[str, ...] = ()
    """Conditions that the program was exported with."""

    @property
    def buckets(self) -> list[tuple[int, ...]]:
        """All combinations of the dimensions' buckets."""
        return list(product(*(d.buckets for d in self.dimensions)))

    def bucketed(self, *wanted: Collection[int]) -> "DynamicShape":
        """Return the shape with buckets at each dimension's wanted sizes, or powers of two, within the exported range.

        A size of 1 has its own bucket, because kernels and views treat it specially. A dimension without valid sizes
        has no buckets.
        """
        dimensions = []
        for d, own in zip(self.dimensions, wanted, strict=True):
            most = max(own, default=0) if d.most is None else d.most
            powers = (LEAST_BUCKET << n for n in range(most.bit_length()))
            sizes = {min(size, most) for size in own or (*(p for p in powers if p < most), most)}
            buckets: list[int] = []
            tried = d.least - 1  # try each size once: conditions take microseconds each
            for size in sorted(sizes if d.least > 1 else sizes | {d.least}):
                found = self.valid(d, size, tried + 1)
                buckets += [] if found is None else [found]
                tried = max(tried, size)
            dimensions.append(replace(d, buckets=tuple(buckets)))
        return replace(self, dimensions=tuple(dimensions))

    def valid(self, dimension: Dimension, size: int, least: int | None = None) -> int | None:
        """Return the largest valid size of a dimension from `least` to `size`; None if there is none.

        `least` defaults to the dimension's own.
        """
        conditions = self.conditions(dimension)
        # In terms of the symbol: `size` rounds down, `least` rounds up.
        lowest = -((dimension.offset - (dimension.least if least is None else least)) // dimension.step)
        for value in range(dimension.symbol_value(size), lowest - 1, -1):
            if all(_holds(c, {dimension.symbol: value}) for c in conditions):
                return value * dimension.step + dimension.offset
        return None

    def conditions(self, dimension: Dimension) -> list[str]:
        """Return the constraints on this dimension's symbol alone."""
        return [c for c in self.constraints if names_in(c) == {dimension.symbol}]

    def checked(self, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return representative sizes of a bucket: the largest, the smallest, and one in between."""
        least, middle = [], []
        for d, size in zip(self.dimensions, sizes, strict=True):
            below = max((b for b in d.buckets if b < size), default=d.least - d.step)
            least.append(next(s for s in range(below + d.step, size + 1, d.step) if self.valid(d, s) == s))
            middle.append(self.valid(d, (least[-1] + size) // 2) or size)
        return list(dict.fromkeys([sizes, tuple(least), tuple(middle)]))

    def symbols(self, sizes: Sequence[int]) -> dict[str, int]:
        """Return the symbols' values, given the dimensions' sizes."""
        return {d.symbol: d.symbol_value(size) for d, size in zip(self.dimensions, sizes, strict=True)}

    def broken_constraint(self, symbols: Mapping[str, int]) -> str | None:
        """Return a constraint that these values violate; None if there is none."""
        return next((c for c in self.constraints if not _holds(c, symbols)), None)


STATIC = DynamicShape()


def _holds(condition: str, symbols: Mapping[str, int]) -> bool:
    try:
        return bool(evaluate(condition, symbols))
    except ZeroDivisionError:
        return False


def smallest_holding(buckets: Collection[tuple[int, ...]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest bucket that holds these sizes; the largest bucket if none does."""
    return min((bucket for bucket in buckets if all(map(operator.ge, bucket, sizes))), default=max(buckets))


def evaluate(expression: str, values: Mapping[str, int]) -> int:
    """Evaluate a size or a condition, such as `2*s0 + 1` or `Eq(Mod(s0, 8), 0)`.

    Only arithmetic on 64-bit integers is supported. Raises UnknownExpression.
    """
    value: int = _value(_parsed(expression), values)
    return value


_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Max": max,
    "Min": min,
    "max": max,
    "min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Eq": operator.eq,
    "Ne": operator.ne,
}


def names_in(expression: str) -> set[str]:
    """Return the symbols of an expression."""
    called = {node.func for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name) and node not in called}


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> ast.expr:
    if len(expression) > _MOST_CHARACTERS:
        raise UnknownExpression(f"a size has {len(expression)} characters, the limit is {_MOST_CHARACTERS}")
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownExpression(f"the size {expression[:80]} cannot be read") from error


def _value(node: ast.expr, values: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.Name(name) if name in values:
            return values[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, values)
        case ast.UnaryOp(ast.Not(), operand):
            return not _value(operand, values)
        case ast.BoolOp(op, operands):
            truths = (_value(operand, values) for operand in operands)
            return all(truths) if isinstance(op, ast.And) else any(truths)
        case ast.BinOp(left, ast.Pow(), ast.Constant(int(exponent))) if 0 <= exponent <= _LARGEST_EXPONENT:
            return _bounded(_value(left, values) ** exponent)
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left, values), _value(right, values)))
        case ast.Compare(left, [op], [right]):
            return _COMPARISONS[type(op)](_value(left, values), _value(right, values))
        case ast.Call(ast.Name(name), args, []) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(a, values) for a in args))
    raise UnknownExpression(f"{ast.unparse(node)[:80]} in a size is not known")


def _bounded(value: int) -> int:
    """Refuse numbers beyond 64 bits: nested powers would otherwise take forever. Raises UnknownExpression."""
    if abs(value) >= _LARGEST:
        raise UnknownExpression(f"a size has {value.bit_length()} bits, the limit is {_LARGEST.bit_length() - 1}")
    return value

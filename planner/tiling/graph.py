"""The tiling graph (section 2.3.3): a node group per array, a tiling node per choice, edges with costs in bytes.

A view has no choice of its own: it shares the group of its base array, with renamed axes. The graph of a join_update
has a placeholder group (Figure 2.7(b)), whose nodes are the ways to compute it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cohabit.planner.tiling.costs import Exchange, Form, Mesh, Moved, bounds, converted, exchanged, mesh_of, volumes
from cohabit.planner.tiling.expressions import (
    Expression,
    Fold,
    JoinUpdate,
    Map,
    NewArray,
    Region,
    Scan,
    UnsupportedExpression,
    View,
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Storage of an array: in one form, or as several copies in different forms."""

    name: str
    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute an operator: the forms of its inputs, and that of its result."""

    inputs: tuple[Form, ...]
    output: Form


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """An array with its tilings, or the placeholder of a join_update with its ways."""

    expression: Expression
    choices: tuple[Tiling, ...] | tuple[Way, ...]
    extra_bytes: tuple[int, ...]
    """Memory per worker that each choice takes beyond an even share."""

    @property
    def is_placeholder(self) -> bool:
        return isinstance(self.choices[0], Way)


@dataclass(frozen=True, slots=True)
class GroupEdge:
    """Bytes moved for every pair of choices of two groups, which may be the same group."""

    source: int
    target: int
    reads: Expression
    by: Expression
    logical: np.ndarray
    wire: np.ndarray


@dataclass(frozen=True)
class TilingGraph:
    """The tiling graph of some outputs for `workers` workers.

    `extra_bytes` limits each worker's memory for copies; None allows a tenth of its share of the inputs. `thesis`
    selects the thesis' model: rows, columns and duplicates only, Figure 2.5's rule for dot, logical bytes. With
    `frees_results`, only copies of inputs count against the limit; copies of results are short-lived.
    """

    outputs: tuple[Expression, ...]
    workers: int
    extra_bytes: int | None = None
    thesis: bool = False
    frees_results: bool = False

    @staticmethod
    def of(outputs: object, workers: int, extra_bytes: int | None = None, **model: bool) -> "TilingGraph":
        """Return the graph of one or several lazy arrays; `model` has `thesis` or `frees_results`.

        Raises UnsupportedExpression for anything else.
        """
        expressions = []
        for array in outputs if isinstance(outputs, Sequence) else (outputs,):
            expression = getattr(array, "expression", None)
            if not isinstance(expression, Expression):
                raise UnsupportedExpression(f"{array!r:.60} is not a lazy array; make arrays with newarray")
            expressions.append(expression)
        return TilingGraph(tuple(expressions), workers, extra_bytes, **model)

    @cached_property
    def mesh(self) -> Mesh:
        return (self.workers,) if self.thesis else mesh_of(self.workers)

    @cached_property
    def expressions(self) -> tuple[Expression, ...]:
        """All expressions, each after its inputs."""
        ordered: dict[int, Expression] = {}
        stack = [(e, False) for e in reversed(self.outputs)]
        while stack:
            expression, are_inputs_done = stack.pop()
            if are_inputs_done:
                ordered[id(expression)] = expression
            elif id(expression) not in ordered:
                stack += [(expression, True), *[(e, False) for e in reversed(expression.inputs)]]
        return tuple(ordered.values())

    @property
    def input_bytes(self) -> int:
        return sum(e.nbytes for e in self.expressions if isinstance(e.operator, NewArray))

    @cached_property
    def limit_bytes(self) -> int:
        return self.input_bytes // self.workers // 10 if self.extra_bytes is None else self.extra_bytes

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        groups = []
        for expression in self.expressions:
            if isinstance(expression.operator, JoinUpdate):
                ways = tuple(self.ways(expression))
                groups.append(NodeGroup(expression, ways, (0,) * len(ways)))
            if not isinstance(expression.operator, View):
                tilings = self._tilings(expression)
                groups.append(NodeGroup(expression, tuple(tilings), tuple(tilings.values())))
        return tuple(groups)

    @cached_property
    def _read(self) -> set[int]:
        """Ids of the arrays that operators read, directly or through a view."""
        return {id(base_of(source)[0]) for e in self.expressions for source in e.inputs}

    @cached_property
    def _index(self) -> dict[tuple[int, bool], int]:
        return {(id(g.expression), g.is_placeholder): index for index, g in enumerate(self.groups)}

    def group_of(self, expression: Expression, placeholder: bool = False) -> int:
        """Return the index of the group of an array, or of a view's base array."""
        return self._index[id(base_of(expression)[0]), placeholder]

    def forms_of(self, expression: Expression, choice: int) -> tuple[Form, ...]:
        """Return the forms of an array, or of a view in its own axes, under a choice of its group."""
        base, axes = base_of(expression)
        tiling = self.groups[self.group_of(base)].choices[choice]
        assert isinstance(tiling, Tiling)
        return tuple(in_view(form, axes) for form in tiling.forms)

    def _tilings(self, expression: Expression) -> dict[Tiling, int]:
        """Return the possible tilings of an array, with the memory of each beyond an even share."""
        ndim, size = len(self.mesh), expression.nbytes
        forms: dict[str, Form] = {
            "row": (0,) * ndim,
            "column": (1,) * ndim,
            "block": (0, 1),
            "transposed block": (1, 0),
        }
        tiled = {
            Tiling(name, (form,)): 0
            for name, form in forms.items()
            if len(form) == ndim and set(form) <= {*range(len(expression.shape))} and self._fills(expression, form)
        }
        whole = Tiling("replicated", ((None,) * ndim,))
        if not tiled:
            return {whole: 0}
        if id(expression) not in self._read:  # nothing reads copies
            return tiled
        copies = {} if self.thesis else {whole: size - size // self.workers}
        if {"row", "column"} <= {t.name for t in tiled}:
            copies[Tiling("duplicated", (forms["row"], forms["column"]))] = size // self.workers
        if self.frees_results and not isinstance(expression.operator, NewArray):
            copies = dict.fromkeys(copies, 0)
        return tiled | {tiling: extra for tiling, extra in copies.items() if extra <= self.limit_bytes}

    def _fills(self, expression: Expression, form: Form) -> bool:
        """Whether every worker has a part of an array in a form."""
        return bool(volumes(bounds(expression.shape, form, self.mesh)).min() > 0)

    def ways(self, by: Expression, form: Form | None = None) -> tuple[Way, ...]:
        """Return the ways to compute an operator; for a map or region, the one way for the result's `form`."""
        operator, ndim = by.operator, len(self.mesh)
        if isinstance(operator, Map | Region) and form is not None:
            aligned = _aligned if isinstance(operator, Map) else lambda form, by, source: form
            return (Way(tuple(aligned(form, by, source) for source in by.inputs), form),)
        ways = []
        if isinstance(operator, JoinUpdate):
            joins = operator.ways
            if self.thesis and operator.is_dot:  # Figure 2.5, lines 18 to 24
                n, k = by.inputs[0].shape
                joins = joins[:1] if n <= k else joins[1:2]
            ways = [Way(tuple((axis,) * ndim for axis in j.axes), (j.output,) * ndim) for j in joins]
            if operator.is_dot and ndim == 2:  # a block of the result from rows of one and columns of the other
                ways.append(Way(((0, None), (None, 1)), (0, 1)))
        elif isinstance(operator, Fold | Scan):
            forms = itertools.product((None, *range(len(by.inputs[0].shape))), repeat=ndim)
            ways = [Way((form,), output) for form in forms if (output := _output(operator, form)) is not None]
        return tuple(way for way in ways if all(map(self._fills, by.inputs, way.inputs)))

    def bytes_of(self, moved: Moved) -> int:
        """Return the bytes that the search minimizes."""
        return moved.logical if self.thesis else moved.wire

    def read(self, by: Expression, number: int, held: Iterable[Form], form: Form) -> tuple[Exchange, Moved]:
        """Return the cheapest exchange for an operator's input `number`, held in some forms, and its bytes."""
        source, operator = by.inputs[number], by.operator
        shape, offset = source.shape, (0,) * len(source.shape)
        if isinstance(operator, Region):
            shape, offset = by.shape, operator.offsets[number]
        itemsize = source.dtype.itemsize
        exchanges = [Exchange(source.shape, have, shape, form, offset, itemsize, self.mesh) for have in held]
        return min(((e, exchanged(e)) for e in exchanges), key=lambda pair: self.bytes_of(pair[1]))

    def stored(self, by: Expression, output: Form, form: Form) -> Moved:
        """Count the bytes of storing a result, computed as `output`, in a form."""
        return converted(by.shape, output, form, by.dtype.itemsize, self.mesh)

    def best_way(
        self, by: Expression, number: int, held: Iterable[Form], form: Form, ways: Iterable[Way]
    ) -> tuple[Way, Moved]:
        """Return the cheapest way to make a result in a form with respect to input `number`, and its bytes."""
        costs = (
            (way, self.read(by, number, held, way.inputs[number])[1] + self.stored(by, way.output, form))
            for way in ways
        )
        return min(costs, key=lambda pair: self.bytes_of(pair[1]))

    @cached_property
    def edges(self) -> tuple[GroupEdge, ...]:
        """Edges from inputs to the operators that read them, and from placeholders to their results."""
        return tuple(
            edge for e in self.expressions if not isinstance(e.operator, View) for edge in self._edges_to(e)
        )

    def _edges_to(self, by: Expression) -> Iterator[GroupEdge]:
        result = self.group_of(by)
        tilings = [t for t in self.groups[result].choices if isinstance(t, Tiling)]
        is_join = isinstance(by.operator, JoinUpdate)
        target = self.group_of(by, placeholder=is_join)
        joins = [way for way in self.groups[target].choices if isinstance(way, Way)]
        ways = {form: self.ways(by, form) for t in tilings for form in t.forms if not is_join}
        for number, source in enumerate(by.inputs):
            group = self.group_of(source)
            held = [self.forms_of(source, choice) for choice in range(len(self.groups[group].choices))]
            if is_join:
                costs = [[self.read(by, number, forms, way.inputs[number])[1] for way in joins] for forms in held]
            else:  # each form of a result is computed separately
                costs = [
                    [_sum(self.best_way(by, number, forms, f, ways[f])[1] for f in t.forms) for t in tilings]
                    for forms in held
                ]
            yield GroupEdge(group, target, source, by, *_arrays(costs))
        if is_join:
            costs = [[_sum(self.stored(by, way.output, f) for f in t.forms) for t in tilings] for way in joins]
            yield GroupEdge(target, result, by, by, *_arrays(costs))


def _sum(moved: Iterable[Moved]) -> Moved:
    return sum(moved, Moved())


def _arrays(costs: Sequence[Sequence[Moved]]) -> tuple[np.ndarray, np.ndarray]:
    """Return logical bytes and wire bytes."""
    both = np.array([[(moved.logical, moved.wire) for moved in row] for row in costs], np.int64)
    return both[..., 0], both[..., 1]


def _aligned(form: Form, result: Expression, source: Expression) -> Form:
    """Return the form of a map's input that matches a form of its result under NumPy's broadcasting."""
    shift = len(result.shape) - len(source.shape)
    kept = {axis + shift: axis for axis, length in enumerate(source.shape) if length > 1}
    return tuple(kept.get(axis) if isinstance(axis, int) else axis for axis in form)


def in_view(form: Form, axes: tuple[int | None, ...]) -> Form:
    """Convert a form of an array to a form of a view with these axes."""
    return tuple(axes.index(axis) if isinstance(axis, int) and axis in axes else None for axis in form)


def base_of(expression: Expression) -> tuple[Expression, tuple[int | None, ...]]:
    """Return a view's base array, and for each axis of the view the base's axis, None for a new one."""
    axes: tuple[int | None, ...] = tuple(range(len(expression.shape)))
    while isinstance(expression.operator, View):
        inner = expression.operator.axes
        axes = tuple(None if a is None else inner[a] for a in axes)
        (expression,) = expression.inputs
    return expression, axes


def _output(operator: Fold | Scan, form: Form) -> Form | None:
    """Return the form of a fold's or scan's result from tiles in `form`; None if these do not suffice."""
    if isinstance(operator, Scan):
        return None if operator.axis in form else form
    if not operator.combine and set(form) & set(operator.axes):
        return None
    shifts = [0 if operator.keepdims else sum(folded < axis for folded in operator.axes) for axis in range(2)]
    return tuple(
        "partial" if axis in operator.axes else axis - shifts[axis] if isinstance(axis, int) else None
        for axis in form
    )

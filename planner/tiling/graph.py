"""The tiling graph (section 2.3.3): a node group per array, a tiling node per choice, edges that cost bytes.

A view has no choice of its own: it shares the group of the array that it shows, with the axes renamed. The graph of
a join_update has a placeholder group (Figure 2.7(b)), whose nodes are the ways to compute it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cohabit.planner.tiling.arrays import (
    Expression,
    Fold,
    JoinUpdate,
    LazyArray,
    Map,
    NewArray,
    Region,
    Scan,
    Shape,
    View,
)
from cohabit.planner.tiling.costs import Exchange, Form, Mesh, Moved, bounds, converted, exchanged, mesh_of, volumes


@dataclass(frozen=True, slots=True)
class Tiling:
    """How an array is kept: as one form, or as several copies of different forms."""

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
    """Bytes from every choice of one group to every choice of the other. Both may be the same group."""

    source: int
    target: int
    reads: Expression
    by: Expression
    logical: np.ndarray
    wire: np.ndarray


@dataclass(frozen=True)
class TilingGraph:
    """Of some outputs, for `workers` workers.

    `extra_bytes` limits each worker's memory for copies; None allows a tenth of its share of the inputs. `thesis`
    takes the thesis' model: rows, columns and duplicates only, Figure 2.5's rule for dot, logical bytes. With
    `frees_results`, only copies of inputs count against the limit, not those of results, which live for a short time.
    """

    outputs: tuple[Expression, ...]
    workers: int
    extra_bytes: int | None = None
    thesis: bool = False
    frees_results: bool = False

    @staticmethod
    def of(outputs: object, workers: int, extra_bytes: int | None = None, **model: bool) -> "TilingGraph":
        """Return the graph of one or several lazy arrays; `model` has `thesis` or `frees_results`."""
        arrays = outputs if isinstance(outputs, Sequence) else (outputs,)
        expressions = tuple(a.expression for a in arrays if isinstance(a, LazyArray))
        return TilingGraph(expressions, workers, extra_bytes, **model)

    @cached_property
    def mesh(self) -> Mesh:
        return (self.workers,) if self.thesis else mesh_of(self.workers)

    @cached_property
    def expressions(self) -> tuple[Expression, ...]:
        """All expressions, inputs before those that read them."""
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
        """The arrays that some operator reads, by themselves or through a view."""
        return {id(base_of(source)[0]) for e in self.expressions for source in e.inputs}

    @cached_property
    def _index(self) -> dict[tuple[int, bool], int]:
        return {(id(g.expression), g.is_placeholder): index for index, g in enumerate(self.groups)}

    def group_of(self, expression: Expression, placeholder: bool = False) -> int:
        """Return the index of an array's group, or of the array that a view shows."""
        return self._index[id(base_of(expression)[0]), placeholder]

    def forms_of(self, expression: Expression, choice: int) -> tuple[Form, ...]:
        """Return the forms of an array, or of a view in its own axes, under a choice of its group."""
        base, axes = base_of(expression)
        tiling = self.groups[self.group_of(base)].choices[choice]
        assert isinstance(tiling, Tiling)
        return tuple(in_view(form, axes) for form in tiling.forms)

    def _tilings(self, expression: Expression) -> dict[Tiling, int]:
        """Return the tilings that an array can have, and the memory that each takes beyond an even share."""
        ndim, size = len(self.mesh), expression.nbytes
        named = {"row": 0, "column": 1}
        forms = {name: (axis,) * ndim for name, axis in named.items() if axis < len(expression.shape)}
        if ndim == 2 and len(expression.shape) == 2:
            forms |= {"block": (0, 1), "transposed block": (1, 0)}
        tiled = {
            Tiling(name, (form,)): 0
            for name, form in forms.items()
            if volumes(bounds(expression.shape, form, self.mesh)).min() > 0
        }
        whole = Tiling("replicated", ((None,) * ndim,))
        if not tiled:
            return {whole: 0}
        if id(expression) not in self._read:  # a copy would only cost
            return tiled
        copies = {} if self.thesis else {whole: size - size // self.workers}
        if {"row", "column"} <= {t.name for t in tiled}:
            copies[Tiling("duplicated", ((0,) * ndim, (1,) * ndim))] = size // self.workers
        if self.frees_results and not isinstance(expression.operator, NewArray):
            copies = dict.fromkeys(copies, 0)
        return tiled | {tiling: extra for tiling, extra in copies.items() if extra <= self.limit_bytes}

    def ways(self, expression: Expression) -> tuple[Way, ...]:
        """Return the ways to compute a fold, a scan or a join_update in which no worker's tile is empty."""
        operator, ndim = expression.operator, len(self.mesh)
        ways = []
        if isinstance(operator, JoinUpdate):
            joins = operator.ways
            if self.thesis and operator.is_dot:  # Figure 2.5, lines 18 to 24
                n, k = expression.inputs[0].shape
                joins = joins[:1] if n <= k else joins[1:2]
            ways = [Way(tuple((axis,) * ndim for axis in j.axes), (j.output,) * ndim) for j in joins]
            if operator.is_dot and ndim == 2:  # a block of the result from rows of one and columns of the other
                ways.append(Way(((0, None), (None, 1)), (0, 1)))
        elif isinstance(operator, Fold | Scan):
            axes = range(len(expression.inputs[0].shape))
            forms = itertools.product((None, *axes), repeat=ndim)
            ways = [Way((form,), output) for form in forms if (output := _output(operator, form)) is not None]
        return tuple(
            way
            for way in ways
            if all(
                volumes(bounds(e.shape, f, self.mesh)).min() > 0
                for e, f in zip(expression.inputs, way.inputs, strict=True)
            )
        )

    def read(
        self,
        source: Expression,
        forms: tuple[Form, ...],
        target: Form,
        target_shape: Shape | None = None,
        offset: Shape | None = None,
    ) -> tuple[Exchange, Moved]:
        """Return the cheapest exchange of one of an array's forms for a target, and its bytes."""
        shape, offset = target_shape or source.shape, offset or (0,) * len(source.shape)
        itemsize = source.dtype.itemsize
        exchanges = [Exchange(source.shape, form, shape, target, offset, itemsize, self.mesh) for form in forms]
        return min(((e, exchanged(e)) for e in exchanges), key=lambda pair: self.bytes_of(pair[1]))

    def bytes_of(self, moved: Moved) -> int:
        """Return the bytes that the search minimizes."""
        return moved.logical if self.thesis else moved.wire

    def best_way(self, expression: Expression, forms: tuple[Form, ...], target: Form) -> tuple[Way, Moved]:
        """Return the cheapest way to compute a fold or scan of an array held in `forms` as `target`."""
        ways = [(way, self._way_bytes(expression, way, forms, target)) for way in self._ways(expression)]
        return min(ways, key=lambda pair: self.bytes_of(pair[1]))

    def _way_bytes(self, expression: Expression, way: Way, forms: tuple[Form, ...], target: Form) -> Moved:
        read = self.read(expression.inputs[0], forms, way.inputs[0])[1]
        return read + self.stored(expression, way.output, (target,))

    def stored(self, expression: Expression, output: Form, forms: tuple[Form, ...]) -> Moved:
        """Count what it takes to store a result, computed as `output`, in every form."""
        moved = (converted(expression.shape, output, f, expression.dtype.itemsize, self.mesh) for f in forms)
        return sum(moved, Moved())

    def _ways(self, expression: Expression) -> tuple[Way, ...]:
        if id(expression) not in self._known_ways:
            self._known_ways[id(expression)] = self.ways(expression)
        return self._known_ways[id(expression)]

    @cached_property
    def _known_ways(self) -> dict[int, tuple[Way, ...]]:
        return {}

    @cached_property
    def edges(self) -> tuple[GroupEdge, ...]:
        """Edges from inputs to the operators that read them, and from placeholders to their results."""
        return tuple(
            edge for e in self.expressions if not isinstance(e.operator, View) for edge in self._edges_to(e)
        )

    def _edges_to(self, by: Expression) -> Iterator[GroupEdge]:
        is_join = isinstance(by.operator, JoinUpdate)
        target = self.group_of(by, placeholder=is_join)
        choices = self.groups[target].choices
        for number, source in enumerate(by.inputs):
            group = self.group_of(source)
            held = [self.forms_of(source, choice) for choice in range(len(self.groups[group].choices))]
            costs = [[self._cost(by, number, forms, choice) for choice in choices] for forms in held]
            yield _edge(group, target, source, by, costs)
        if is_join:
            result = self.group_of(by)
            tilings = [t for t in self.groups[result].choices if isinstance(t, Tiling)]
            ways = [w for w in choices if isinstance(w, Way)]
            costs = [[self.stored(by, way.output, t.forms) for t in tilings] for way in ways]
            yield _edge(target, result, by, by, costs)

    def _cost(self, by: Expression, number: int, held: tuple[Form, ...], choice: Tiling | Way) -> Moved:
        """Count what it takes to read input `number`, held in some forms; every form of a result is made by itself."""
        source = by.inputs[number]
        if isinstance(choice, Way):
            return self.read(source, held, choice.inputs[number])[1]
        if isinstance(by.operator, Map):
            return sum((self.read(source, held, aligned(f, by, source))[1] for f in choice.forms), Moved())
        if isinstance(by.operator, Region):
            offset = by.operator.offsets[number]
            return sum((self.read(source, held, f, by.shape, offset)[1] for f in choice.forms), Moved())
        return sum((self.best_way(by, held, f)[1] for f in choice.forms), Moved())


def aligned(form: Form, result: Expression, source: Expression) -> Form:
    """Return the form of a map's input that goes with a form of its result, by NumPy's broadcasting."""
    shift = len(result.shape) - len(source.shape)
    kept = {axis + shift: axis for axis, length in enumerate(source.shape) if length > 1}
    return tuple(kept.get(axis) if isinstance(axis, int) else axis for axis in form)


def in_view(form: Form, axes: tuple[int | None, ...]) -> Form:
    """Return a form of an array as one of a view of these axes of it."""
    return tuple(axes.index(axis) if isinstance(axis, int) else axis for axis in form)


def base_of(expression: Expression) -> tuple[Expression, tuple[int | None, ...]]:
    """Return the array that a view shows, and for each axis of the view the array's axis, None for a new one."""
    axes: tuple[int | None, ...] = tuple(range(len(expression.shape)))
    while isinstance(expression.operator, View):
        inner = expression.operator.axes
        axes = tuple(None if a is None else inner[a] for a in axes)
        (expression,) = expression.inputs
    return expression, axes


def _output(operator: Fold | Scan, form: Form) -> Form | None:
    """Return the form of a fold's or scan's result of tiles in `form`, None if these do not suffice."""
    if isinstance(operator, Scan):
        return None if operator.axis in form else form
    if not operator.partial and set(form) & set(operator.axes):
        return None
    shifts = [0 if operator.keepdims else sum(folded < axis for folded in operator.axes) for axis in range(2)]
    return tuple(
        "partial" if axis in operator.axes else axis - shifts[axis] if isinstance(axis, int) else None
        for axis in form
    )


def _edge(
    source: int, target: int, reads: Expression, by: Expression, costs: Sequence[Sequence[Moved]]
) -> GroupEdge:
    logical, wire = (
        np.array([[getattr(c, k) for c in row] for row in costs], np.int64) for k in ("logical", "wire")
    )
    return GroupEdge(source, target, reads, by, logical, wire)

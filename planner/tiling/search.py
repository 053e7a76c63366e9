"""Searches of the tiling graph: the thesis' greedy one (Figure 2.8), an exact one, and others for comparison."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from cohabit.planner.errors import UnknownSearcher, UnsupportedProblem
from cohabit.planner.tiling.costs import Exchange, Form, Moved
from cohabit.planner.tiling.expressions import Expression, JoinUpdate
from cohabit.planner.tiling.graph import Tiling, TilingGraph, Way

Picks = list[int]
"""One choice per group of a tiling graph."""

BRUTE_FORCE_LIMIT = 1 << 24


@dataclass(frozen=True, slots=True)
class Step:
    """One computation of an operator: reads of its inputs, the form of its result, and the forms it is stored in."""

    reads: tuple[Exchange, ...]
    output: Form
    forms: tuple[Form, ...]


@dataclass(frozen=True)
class TilingPlan:
    """One choice per group of a graph, and its costs."""

    graph: TilingGraph
    picks: tuple[int, ...]

    @cached_property
    def moved(self) -> Moved:
        return sum(self.edges, Moved())

    @property
    def edges(self) -> tuple[Moved, ...]:
        """Bytes of every edge of the graph."""
        picked = [(e, self.picks[e.source], self.picks[e.target]) for e in self.graph.edges]
        return tuple(Moved(int(e.logical[s, t]), int(e.wire[s, t])) for e, s, t in picked)

    @property
    def nbytes(self) -> int:
        """The minimized bytes: wire bytes, or logical bytes in the thesis' model."""
        return self.graph.bytes_of(self.moved)

    @property
    def extra_bytes(self) -> int:
        return sum(g.extra_bytes[p] for g, p in zip(self.graph.groups, self.picks, strict=True))

    def tiling(self, expression: Expression) -> Tiling:
        """Return the tiling of an array, or of a view's base array."""
        group = self.graph.group_of(expression)
        tiling = self.graph.groups[group].choices[self.picks[group]]
        assert isinstance(tiling, Tiling)
        return tiling

    def forms(self, expression: Expression) -> tuple[Form, ...]:
        """Return the forms in which an array or a view is held, in its own axes."""
        return self.graph.forms_of(expression, self.picks[self.graph.group_of(expression)])

    def steps(self, by: Expression) -> list[Step]:
        """Return the computations of a map, fold, scan, join_update or region: one for all forms, or one for each."""
        forms = self.forms(by)
        if isinstance(by.operator, JoinUpdate):
            group = self.graph.group_of(by, placeholder=True)
            way = self.graph.groups[group].choices[self.picks[group]]
            assert isinstance(way, Way)
            return [self._step(by, way, forms)]
        held = self.forms(by.inputs[0])
        ways = [self.graph.best_way(by, 0, held, form, self.graph.ways(by, form))[0] for form in forms]
        return [self._step(by, way, (form,)) for way, form in zip(ways, forms, strict=True)]

    def _step(self, by: Expression, way: Way, forms: tuple[Form, ...]) -> Step:
        wanted = enumerate(zip(by.inputs, way.inputs, strict=True))
        reads = tuple(self.graph.read(by, number, self.forms(source), form)[0] for number, (source, form) in wanted)
        return Step(reads, way.output, forms)


class _Costs:
    """A graph's costs as arrays: per choice, and per pair of choices of two groups; parallel edges are summed."""

    def __init__(self, graph: TilingGraph) -> None:
        self.extra = [np.array(g.extra_bytes, np.int64) for g in graph.groups]
        self.limit = graph.limit_bytes
        self.single = [np.zeros(len(g.choices), np.int64) for g in graph.groups]
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        for edge in graph.edges:
            costs = edge.logical if graph.thesis else edge.wire
            a, b = edge.source, edge.target
            if a == b:
                self.single[a] = self.single[a] + costs.diagonal()
            else:
                costs, key = (costs, (a, b)) if a < b else (costs.T, (b, a))
                self.pairs[key] = self.pairs.get(key, 0) + costs
        self.adjacent: list[dict[int, np.ndarray]] = [{} for _ in graph.groups]
        for (a, b), costs in self.pairs.items():
            self.adjacent[a][b], self.adjacent[b][a] = costs, costs.T

    def of(self, picks: Picks) -> int:
        singles = sum(int(costs[pick]) for costs, pick in zip(self.single, picks, strict=True))
        return singles + sum(int(costs[picks[a], picks[b]]) for (a, b), costs in self.pairs.items())


def greedy(graph: TilingGraph) -> Picks:
    """Choose first for the group with the most adjacent groups (Figure 2.8).

    FindCost sums the least cost of an edge to each adjacent group; its recursion into views is implicit here, as a
    view shares the group of its array. Duplication counts against the memory limit (section 2.3.4).
    """
    costs = _Costs(graph)
    order = sorted(range(len(graph.groups)), key=lambda group: -len(costs.adjacent[group]))
    return _one_by_one(
        costs, order, [{other: edge.min(axis=1) for other, edge in a.items()} for a in costs.adjacent]
    )


def recursive(graph: TilingGraph) -> Picks:
    """Choose as if the graph were a tree with the outputs at its root.

    Spartan's earlier optimizer found the least cost of an expression recursively from its inputs; for an array that
    is read twice, the first read decided.
    """
    costs = _Costs(graph)
    parents: dict[int, int | None] = {}
    stack: list[tuple[int, int | None]] = [(group, None) for group in range(len(graph.groups))]
    while stack:  # depth first from the last group, which is an output
        group, parent = stack.pop()
        if group not in parents:
            parents[group] = parent
            stack += [(other, group) for other in costs.adjacent[group] if other not in parents]
    subtrees: list[dict[int, np.ndarray]] = [{} for _ in graph.groups]
    for group, parent in reversed(parents.items()):
        if parent is not None:
            best = costs.single[group] + sum(subtrees[group].values())
            subtrees[parent][group] = (best[:, None] + costs.adjacent[group][parent]).min(axis=0)
    return _one_by_one(costs, list(parents), subtrees)


def _one_by_one(costs: _Costs, order: Sequence[int], expected: Sequence[dict[int, np.ndarray]]) -> Picks:
    """Choose in this order. `expected[group]` has estimated costs per choice for adjacent groups not chosen yet."""
    picks, left = dict[int, int](), costs.limit
    for group in order:
        total = costs.single[group].astype(np.float64)
        for other, edge in costs.adjacent[group].items():
            total += edge[:, picks[other]] if other in picks else expected[group].get(other, 0)
        total[costs.extra[group] > left] = np.inf
        picks[group] = int(total.argmin())
        left -= int(costs.extra[group][picks[group]])
    return [picks[group] for group in range(len(order))]


def brute_force(graph: TilingGraph) -> Picks:
    """Compare all combinations. Raises UnsupportedProblem for more than 2**24."""
    costs = _Costs(graph)
    sizes = [len(single) for single in costs.single]
    if math.prod(sizes) > BRUTE_FORCE_LIMIT:
        raise UnsupportedProblem(
            f"{float(math.prod(sizes)):.0e} combinations of tilings, brute force takes {BRUTE_FORCE_LIMIT} at most;"
            " use exact"
        )

    def spread(values: np.ndarray, *groups: int) -> np.ndarray:
        return values.reshape([n if g in groups else 1 for g, n in enumerate(sizes)])

    total, extra = np.zeros(sizes), np.zeros(sizes, np.int64)
    for group in range(len(sizes)):
        total += spread(costs.single[group], group)
        extra += spread(costs.extra[group], group)
    for (a, b), pair in costs.pairs.items():
        total += spread(pair, a, b)
    total[extra > costs.limit] = np.inf
    return [int(pick) for pick in np.unravel_index(int(total.argmin()), sizes)]


def exact(graph: TilingGraph) -> Picks:
    """Minimize the bytes by an integer linear program; ties go to less memory.

    HiGHS cannot distinguish costs that differ by less than 1e-9 of the largest edge. Therefore single picks of its
    solution are changed afterwards, as long as that helps.
    """
    costs = _Costs(graph)
    return _settled(costs, min((_solved(costs, 1), greedy(graph), by_row(graph), by_column(graph)), key=costs.of))


def worst(graph: TilingGraph) -> Picks:
    """Maximize the bytes."""
    return _solved(_Costs(graph), -1)


def _solved(costs: _Costs, sign: int) -> Picks:
    """Solve the program: a variable per choice, and per pair of choices of two adjacent groups.

    Costs that do not depend on the other group's choice move to the choices' own costs. Choices that then look the
    same to an edge share its variables. This changes no solution, and makes the program smaller.
    """
    first = np.concatenate([[0], np.cumsum([len(single) for single in costs.single])])
    single = [sign * values.astype(np.float64) for values in costs.single]
    rows, columns, values, weights = (list[np.ndarray]() for _ in range(4))
    sums: list[float] = []

    def equation(variables: np.ndarray, signs: np.ndarray, total: float) -> None:
        rows.append(np.full(len(variables), len(sums)))
        columns.append(variables)
        values.append(signs)
        sums.append(total)

    for group, end in enumerate(first[1:]):  # one choice per group
        equation(np.arange(first[group], end), np.ones(end - first[group]), 1)
    count = int(first[-1])
    for (a, b), pair in costs.pairs.items():
        pair = sign * pair.astype(np.float64)
        # Move costs that do not depend on the other group, then merge equal choices.
        for group, axis in ((a, 1), (b, 0)):
            least = pair.min(axis=axis, keepdims=True)
            single[group] += least.ravel()
            pair = pair - least
        pair, of_a = np.unique(pair, axis=0, return_inverse=True)
        pair, of_b = np.unique(pair, axis=1, return_inverse=True)
        if pair.size == 1:
            continue
        variables = count + np.arange(pair.size).reshape(pair.shape)
        for group, lines, kinds in ((a, variables, of_a), (b, variables.T, of_b)):
            for kind, line in enumerate(lines):  # if a choice of this kind is picked, so is one of its pairs
                choices = first[group] + np.flatnonzero(kinds == kind)
                equation(np.append(line, choices), np.repeat([1.0, -1.0], [len(line), len(choices)]), 0)
        weights.append(pair.ravel())
        count += pair.size
    # Solve for integer choices within the memory limit; pairs follow from these.
    objective = np.concatenate([*single, *weights])
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(len(sums), count)
    )
    constraints = [LinearConstraint(matrix.tocsr(), sums, sums)]
    extra = np.concatenate([*costs.extra, np.zeros(count - first[-1])])
    if extra.any():
        constraints.append(LinearConstraint(extra[None, :] / costs.limit, -np.inf, 1))
    solved = milp(
        objective / (np.abs(objective).max() or 1) * 1e3,
        integrality=np.arange(count) < first[-1],
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0, "presolve": False},  # presolving is slow, and finds nothing here
    )
    if solved.x is None:  # pragma: no cover
        raise UnsupportedProblem(f"HiGHS found no tiling: {solved.message}; use greedy")
    return [int(solved.x[a:b].argmax()) for a, b in itertools.pairwise(first)]


def _settled(costs: _Costs, picks: Picks) -> Picks:
    """Change single picks while that lowers the bytes, or the memory at equal bytes."""
    picks, used = list(picks), sum(int(extra[pick]) for extra, pick in zip(costs.extra, picks, strict=True))
    is_changed = True
    while is_changed:
        is_changed = False
        for group, extra in enumerate(costs.extra):
            total = costs.single[group] + sum(
                edge[:, picks[other]] for other, edge in costs.adjacent[group].items()
            )
            fits = used - extra[picks[group]] + extra <= costs.limit
            pick = min(np.flatnonzero(fits), key=lambda p: (total[p], extra[p]), default=picks[group])
            if (total[pick], extra[pick]) < (total[picks[group]], extra[picks[group]]):
                used += int(extra[pick] - extra[picks[group]])
                picks[group], is_changed = int(pick), True
    return picks


def by_row(graph: TilingGraph) -> Picks:
    """Tile every array by rows, or by columns if it has too few rows."""
    return _fixed(graph, 0)


def by_column(graph: TilingGraph) -> Picks:
    """Tile every array by columns, vectors by rows."""
    return _fixed(graph, 1)


def _fixed(graph: TilingGraph, axis: int) -> Picks:
    """Give all arrays the same tiling, and each join_update its cheapest way for that tiling."""
    costs, form = _Costs(graph), (axis,) * len(graph.mesh)
    picks = []
    for group in graph.groups:
        forms = [choice.forms for choice in group.choices if isinstance(choice, Tiling)]
        picks.append(forms.index((form,)) if (form,) in forms else 0)
    for index, group in enumerate(graph.groups):
        if group.is_placeholder:
            total = sum(edge[:, picks[other]] for other, edge in costs.adjacent[index].items())
            picks[index] = int(np.argmin(total))
    return picks


SEARCHES: dict[str, Callable[[TilingGraph], Picks]] = {
    "exact": exact,
    "greedy": greedy,
    "recursive": recursive,
    "row": by_row,
    "column": by_column,
    "worst": worst,
    "brute-force": brute_force,
}


def plan_tiling(graph: TilingGraph, search: str = "exact") -> TilingPlan:
    """Choose a tiling for every array. Raises UnknownSearcher."""
    if search not in SEARCHES:
        raise UnknownSearcher(search, tuple(SEARCHES))
    return TilingPlan(graph, tuple(SEARCHES[search](graph)))

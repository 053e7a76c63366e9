"""The tiling graph and its searches, compared with the thesis' figures (Huang, chapters 2 and 3, appendix A)."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.tiling_programs import SUBJECTS, random_program
from cohabit.planner.errors import UnknownSearcher, UnsupportedProblem
from cohabit.planner.tiling.arrays import LazyArray, join_update, map_tiles, newarray
from cohabit.planner.tiling.costs import Exchange, bounds, exchanged, mesh_of, reduced
from cohabit.planner.tiling.expressions import UnsupportedExpression
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import SEARCHES, TilingPlan, plan_tiling
from cohabit.planner.tiling.trial import tried

P = 4
ITEM = 4
"""Bytes of a float32. The thesis counts elements."""


def thesis_graph(*outputs: LazyArray, workers: int = P, extra_bytes: int = 0) -> TilingGraph:
    return TilingGraph.of(outputs, workers, extra_bytes, thesis=True)


def tilings(plan: TilingPlan, *arrays: LazyArray) -> list[str]:
    return [plan.tiling(array.expression).name for array in arrays]


def costs_between(graph: TilingGraph, source: LazyArray, target: LazyArray) -> list[list[int]]:
    """Elements that an edge costs, by tiling of the source and choice of the target."""
    (edge,) = (e for e in graph.edges if e.reads is source.expression and e.by is target.expression)
    return (edge.logical // ITEM).tolist()


def test_figure_2_2a_each_worker_reads_all_of_y() -> None:
    n, k, m = 64, 16, 8
    x, y = newarray((n, k)), newarray((k, m))
    z = np.dot(x, y)
    graph = thesis_graph(z)
    assert costs_between(graph, y, z) == [[P * k * m], [P * k * m]]  # however y is tiled
    assert costs_between(graph, x, z) == [[0], [n * k]]
    plan = plan_tiling(graph)
    assert tilings(plan, x, z) == ["row", "row"]
    assert plan.nbytes // ITEM // P == k * m


def test_figure_2_2b_each_worker_sends_all_of_z() -> None:
    n, k, m = 16, 64, 8
    x, y = newarray((n, k)), newarray((k, m))
    z = np.dot(x, y)
    plan = plan_tiling(thesis_graph(z))
    assert tilings(plan, x, y) == ["column", "row"]
    assert plan.nbytes // ITEM // P == n * m


def test_section_2_2_1_names_row_and_column_the_wrong_way_round() -> None:
    # "If n > k ... (a) whose preferred tiling for X is column-wise": by columns, x alone costs n * k more.
    x, y = newarray((64, 16)), newarray((16, 8))
    z = np.dot(x, y)
    by_row, by_column = costs_between(thesis_graph(z), x, z)
    assert by_row < by_column


def test_figure_2_6_has_a_group_per_array_and_a_placeholder_for_the_join() -> None:
    n = 32
    x, y = newarray((n, n), name="x"), newarray((n, n), name="y")
    total, product = x + y, np.dot(x, y)
    z = total - product
    graph = thesis_graph(z)
    of = graph.group_of
    placeholder = of(product.expression, placeholder=True)
    x_, y_, total_, product_, z_ = (of(a.expression) for a in (x, y, total, product, z))
    assert {(e.source, e.target) for e in graph.edges} == {
        (x_, total_), (y_, total_), (x_, placeholder), (y_, placeholder),
        (placeholder, product_), (total_, z_), (product_, z_),
    }  # fmt: skip
    # dot wants x by columns and y by rows, + wants them alike: one is retiled, and all workers update the product.
    assert plan_tiling(graph).nbytes // ITEM == n * n + P * n * n
    assert plan_tiling(graph, "brute-force").nbytes // ITEM == n * n + P * n * n


def test_figure_2_7a_a_map_reads_inputs_of_other_tilings() -> None:
    s1, s2 = newarray((16, 8)), newarray((16, 8))
    d = s1 + s2
    graph = thesis_graph(d)
    for source in (s1, s2):
        assert costs_between(graph, source, d) == [[0, 16 * 8], [16 * 8, 0]]


def test_figure_2_7b_a_join_reads_by_its_axes_and_updates_the_output_of_every_worker() -> None:
    n, k, m = 8, 16, 12
    s1, s2 = newarray((n, k)), newarray((k, m))
    d = np.dot(s1, s2)
    graph = thesis_graph(d)
    assert costs_between(graph, s1, d) == [[n * k], [0]]
    assert costs_between(graph, s2, d) == [[0], [k * m]]
    (update,) = (e for e in graph.edges if e.reads is e.by)
    assert (update.logical // ITEM).tolist() == [[P * n * m, P * n * m]]


def test_figure_3_3_greedy_costs_twice_the_best() -> None:
    size = 64
    a, b = newarray((size, size)), newarray((size, size))
    c, d = a + b, np.transpose(a) + np.transpose(b)
    e = c + d
    graph = thesis_graph(e)
    # "The best tiling for Figure 3.3 is to tile D column-wise and other operators row-wise."
    picks = [0] * len(graph.groups)
    picks[graph.group_of(d.expression)] = 1
    assert TilingPlan(graph, tuple(picks)).nbytes == plan_tiling(graph).nbytes == size * size * ITEM
    # "Smart tiling partitions both C and D row-wise."
    greedy = plan_tiling(graph, "greedy")
    assert tilings(greedy, c, d) == ["row", "row"]
    assert greedy.nbytes == 2 * size * size * ITEM


def test_figure_2_3_als_duplicates_the_ratings_within_the_memory_budget() -> None:
    ratings = newarray((512, 256))
    movies = newarray((256, 4))
    for _ in range(3):
        users = join_update(lambda a, b: a, [ratings, movies], [0, None], (512, 4), 0)
        movies = join_update(lambda a, b: a, [ratings, users], [1, None], (256, 4), 0)
    tight, roomy = (thesis_graph(movies, extra_bytes=extra) for extra in (0, 512 * 256 * ITEM // P))
    duplicated = plan_tiling(roomy)
    assert tilings(duplicated, ratings) == ["duplicated"]
    assert duplicated.extra_bytes == 512 * 256 * ITEM // P
    # Each iteration reads the ratings along the other axis as well, or all workers read them whole.
    assert plan_tiling(tight).nbytes - duplicated.nbytes == 3 * 512 * 256 * ITEM


def test_figure_a_1_a_swapped_axis_turns_rows_into_columns_at_no_cost() -> None:
    x = newarray((8, 8))
    graph = thesis_graph(x.T + x.T)
    assert graph.forms_of(x.T.expression, 0) != graph.forms_of(x.expression, 0)
    swapped = [graph.forms_of(e, 0) for e in graph.expressions if e.inputs == (x.expression,)]
    assert swapped == [((1,),), ((1,),)]
    assert plan_tiling(graph).nbytes == 0


Clause = tuple[int, int, int]
"""Literals as numbers from 1 on; negative ones are negated."""


def tiling_of_formula(clauses: list[Clause], literals: int) -> int:
    """Return the least cost of the appendix' program C(I), in arrays."""
    n = 8
    arrays = [newarray((n, n)) for _ in range(literals)]
    maps = []
    for clause in clauses:
        signed = [arrays[v - 1] if v > 0 else arrays[-v - 1].T for v in clause]
        maps += [signed[i].T + signed[j] for i, j in itertools.permutations(range(3), 2)]
    return plan_tiling(thesis_graph(*maps)).nbytes // (n * n * ITEM)


def test_appendix_a_a_clause_costs_two_if_its_literals_differ_and_six_if_they_are_equal() -> None:
    assert tiling_of_formula([(1, 2, 3)], 3) == 2
    assert tiling_of_formula([(1, 1, 1)], 1) == 6


@pytest.mark.long
def test_appendix_a_a_formula_is_satisfiable_if_its_tiling_costs_two_a_clause() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(12):
        literals = 4
        clauses: list[Clause] = [
            tuple((rng.choice(literals, 3, replace=False) + 1) * rng.choice([-1, 1], 3)) for _ in range(7)
        ]
        is_satisfiable = any(
            all(len({values[abs(v) - 1] == (v > 0) for v in clause}) == 2 for clause in clauses)
            for values in itertools.product((True, False), repeat=literals)
        )
        assert (tiling_of_formula(clauses, literals) == 2 * len(clauses)) == is_satisfiable
        seen.add(is_satisfiable)
    assert seen == {True, False}


def random_graph(seed: int, most: float) -> TilingGraph | None:
    """Return the graph of a random program, None if it has more combinations than `most`."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([96, 128, 130]))
    inputs = [newarray((size, size)) for _ in range(int(rng.integers(1, 4)))]
    outputs = random_program(rng, inputs, int(rng.integers(2, 7)))
    extra = int(rng.choice([0, 1, 4, 16])) * size * size
    graph = TilingGraph.of(outputs, int(rng.choice([2, 3, 4])), extra)
    return graph if math.prod(len(g.choices) for g in graph.groups) <= most else None


@pytest.mark.long
def test_exact_equals_brute_force_on_random_programs() -> None:
    graphs = (graph for seed in itertools.count() if (graph := random_graph(seed, 1 << 13)))
    for graph in itertools.islice(graphs, 120):
        exact = plan_tiling(graph)
        assert exact.nbytes == plan_tiling(graph, "brute-force").nbytes
        assert exact.extra_bytes <= graph.limit_bytes


@pytest.mark.parametrize("operators", [12, 60])
def test_no_search_beats_exact_and_none_is_beaten_by_worst(operators: int) -> None:
    rng = np.random.default_rng(operators)
    graph = TilingGraph.of(random_program(rng, [newarray((128, 128)) for _ in range(4)], operators), P)
    nbytes = {search: plan_tiling(graph, search).nbytes for search in SEARCHES if search != "brute-force"}
    assert min(nbytes.values()) == nbytes["exact"] < nbytes["greedy"]
    assert max(nbytes.values()) == nbytes["worst"]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.name)
@pytest.mark.parametrize("search", ["exact", "greedy", "recursive"])
def test_copies_stay_within_the_memory_limit(subject: Any, search: str) -> None:
    graph = TilingGraph.of(subject.program(*map(newarray, subject.inputs(1))), P)
    assert plan_tiling(graph, search).extra_bytes <= graph.limit_bytes


def test_a_prime_number_of_workers_is_one_line_and_others_are_a_rectangle() -> None:
    assert [mesh_of(p) for p in (1, 2, 4, 7, 12)] == [(1,), (2,), (2, 2), (7,), (3, 4)]


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
@pytest.mark.parametrize("shape", [(7,), (9, 5), (12, 12)])
def test_tiles_of_a_split_array_cover_it_once(workers: int, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(workers)
    for form in itertools.product(range(len(shape)), repeat=len(mesh)):
        count = np.zeros(shape, int)
        for tile in bounds(shape, form, mesh):
            count[tuple(slice(a, b) for a, b in tile)] += 1
        assert (count == 1).all()


def test_a_retiled_array_crosses_but_for_what_each_worker_keeps() -> None:
    moved = exchanged(Exchange((8, 8), (0, 0), (8, 8), (1, 1), (0, 0), ITEM, (2, 2)))
    assert (moved.logical, moved.wire) == (64 * ITEM, 64 * ITEM * 3 // 4)
    moved = exchanged(Exchange((8, 8), (0, 0), (8, 8), (0, 1), (0, 0), ITEM, (2, 2)))
    assert (moved.logical, moved.wire) == (64 * ITEM, 64 * ITEM // 2)
    assert exchanged(Exchange((8, 8), (None, None), (8, 8), (0, 1), (0, 0), ITEM, (2, 2))).logical == 0


def test_a_sum_of_partial_tiles_is_sent_once_for_tiles_and_twice_for_copies() -> None:
    partial = ("partial", "partial")
    for form in ((0, 0), (0, 1)):
        assert reduced((8, 8), partial, form, ITEM, (2, 2)).wire == 3 * 64 * ITEM
    assert reduced((8, 8), partial, (None, None), ITEM, (2, 2)).wire == 2 * 3 * 64 * ITEM


X, V = np.arange(12.0, dtype=np.float32).reshape(4, 3) + 1, np.arange(3, dtype=np.int64)
BUILTINS: list[Callable[[Any, Any], Any]] = [
    lambda x, v: x + v, lambda x, v: 1 - x, lambda x, v: x * 2.0, lambda x, v: 1 / x, lambda x, v: x**2,
    lambda x, v: -x, lambda x, v: abs(x), lambda x, v: np.exp(x), lambda x, v: np.log(x), lambda x, v: np.sqrt(x),
    lambda x, v: np.square(x), lambda x, v: np.sin(x), lambda x, v: np.cos(x), lambda x, v: np.tanh(x),
    lambda x, v: np.sign(x), lambda x, v: np.maximum(x, 2), lambda x, v: np.minimum(2, x), lambda x, v: x > 2,
    lambda x, v: x == v, lambda x, v: np.where(x > 2, x, 0), lambda x, v: np.clip(x, 2, 5),
    lambda x, v: x.astype(np.float64), lambda x, v: v / 2, lambda x, v: np.log1p(x), lambda x, v: np.expm1(x / 9),
    lambda x, v: np.floor(x / 2), lambda x, v: np.logical_and(x > 2, x < 5),
    lambda x, v: np.sum(x), lambda x, v: np.sum(x, axis=0), lambda x, v: np.sum(x > 2), lambda x, v: np.mean(x, axis=1),
    lambda x, v: np.min(x, axis=0), lambda x, v: np.max(x), lambda x, v: np.argmin(x, axis=1),
    lambda x, v: np.argmax(x, axis=0), lambda x, v: np.prod(x / 9, axis=0), lambda x, v: np.var(x, axis=0),
    lambda x, v: np.std(x), lambda x, v: np.linalg.norm(x), lambda x, v: np.linalg.norm(x, axis=1, keepdims=True),
    lambda x, v: np.cumsum(x, axis=0), lambda x, v: np.cumprod(x / 9, axis=1),
    lambda x, v: np.dot(x, x.T), lambda x, v: x.T @ x, lambda x, v: np.dot(x, v), lambda x, v: np.dot(v, v),
    lambda x, v: np.outer(v, v), lambda x, v: np.linalg.inv(x.T @ x + 9 * np.eye(3, dtype=np.float32)),
    lambda x, v: np.linalg.solve(x.T @ x + 9 * np.eye(3, dtype=np.float32), x.T),
    lambda x, v: np.linalg.cholesky(x.T @ x + 9 * np.eye(3, dtype=np.float32)),
    lambda x, v: np.transpose(x), lambda x, v: np.swapaxes(x, 0, 1), lambda x, v: x[1:3], lambda x, v: x[:, 1],
    lambda x, v: x[2], lambda x, v: v[:, None], lambda x, v: np.expand_dims(v, 0), lambda x, v: x[1:, :2].T,
    lambda x, v: np.concatenate([x, x[:2]]), lambda x, v: np.concatenate([x.T, x.T], axis=1),
]  # fmt: skip
"""Calls of NumPy that programs may make; tests/runtime executes them."""


def added_to(x: np.ndarray) -> np.ndarray:
    x += 1
    return x * 2


def test_captured_calls_have_numpys_shapes_and_types() -> None:
    assert len(BUILTINS) >= 40
    for number, builtin in enumerate(BUILTINS):
        lazy, computed = builtin(newarray(X), newarray(V)), np.asarray(builtin(X, V))
        assert (lazy.shape, lazy.dtype) == (computed.shape, computed.dtype), number


def test_control_flow_that_depends_on_values_is_refused() -> None:
    x = newarray((4, 4), name="x")
    with pytest.raises(UnsupportedExpression, match="the values of <lazy"):
        bool(x.sum() > 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: np.linalg.svd(x), "np.svd: lazy arrays have ufuncs and"),
        (lambda x: np.add.outer(x, x), "np.add.outer"),
        (lambda x: np.add(x, x, where=x > 0), r"np.add with \['where'\]"),
        (
            lambda x: np.sum(x, where=x > 0),
            "np.sum of .*: arguments beside the first that are arrays have no tiles",
        ),
        (lambda x: np.concatenate([x, x], axis=None), "np.concatenate of .*: name the axis"),
        (lambda x: np.nan_to_num(x * 1, copy=False), "it changes its arguments"),
        (lambda x: map_tiles(added_to, x), "it changes its arguments"),
        (lambda x: np.sum(x, out=np.zeros(())), "np.sum of .* with out: lazy arrays cannot be written to"),
        (lambda x: np.cumsum(x), "np.cumsum of .*: name the axis"),
        (lambda x: np.max(x, axis=3), "np.max of .*: AxisError: axis 3 is out of bounds for array of dimension 2"),
        (lambda x: np.swapaxes(x, 0, 3), "AxisError: axis2: axis 3 is out of bounds"),
        (lambda x: x[:, 4], "IndexError: index 4 is out of bounds for axis 1 with size 4"),
        (lambda x: x[True], "slices with steps of 1, integers and None only"),
        (lambda x: x[3:1], r"an array of shape \(0, 4\): tiled arrays have elements"),
        (lambda x: np.concatenate([x, x[:2]], axis=1), "ValueError: all the input array dimensions"),
        (lambda x: np.modf(x), "the result is not an array, but tuple"),
        (lambda x: x.astype(np.uint8) + 300, "OverflowError: Python integer 300 out of bounds for uint8"),
        (lambda x: x * np.ma.masked_less(np.ones((4, 4)), 0), "not MaskedArray"),
        (lambda x: x.astype("U3"), "an array of <U3"),
        (lambda x: map_tiles(np.sort, x), "the tiles of sort are not what NumPy makes of the whole"),
        (lambda x: np.sum(newarray((4000, 4), np.float16), axis=0), "the tiles of sum are not what NumPy"),
        (lambda x: x.sort(), "lazy arrays have no sort; there are all, any"),
        (lambda x: x[:, None, :], "at most two axes"),
        (lambda x: x[::2], "slices with steps of 1"),
        (lambda x: np.dot(x, newarray((3, 3))), "np.dot of .*ValueError: shapes"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises((UnsupportedExpression, AttributeError), match=message):
        call(newarray((4, 4)))


def test_the_method_clip_needs_no_second_limit() -> None:
    x = np.arange(12.0).reshape(3, 4)
    for lazy, own in ((newarray(x).clip(3), x.clip(3)), (newarray(x).clip(max=5), x.clip(max=5))):
        assert (tried(lazy.expression) == own).all()


def test_a_sum_in_half_precision_is_tried_at_its_own_length() -> None:
    assert np.sum(newarray((40, 4), np.float16), axis=0).shape == (4,)
    with pytest.raises(UnsupportedExpression, match="not what NumPy makes of the whole"):
        np.sum(newarray((3000, 4), np.float16), axis=0)


def test_an_output_that_is_no_lazy_array_is_refused() -> None:
    with pytest.raises(UnsupportedExpression, match="3 is not a lazy array; make arrays with newarray"):
        TilingGraph.of([newarray((4, 4)), 3], 2)


def test_an_unknown_search_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownSearcher, match="no searcher is called magic; there are exact, greedy"):
        plan_tiling(TilingGraph.of(newarray((4, 4)), 2), "magic")


def test_brute_force_of_too_many_combinations_is_refused() -> None:
    outputs = random_program(np.random.default_rng(0), [newarray((64, 64))], 30)
    with pytest.raises(UnsupportedProblem, match="brute force takes 16777216 at most; use exact"):
        plan_tiling(TilingGraph.of(outputs, P), "brute-force")

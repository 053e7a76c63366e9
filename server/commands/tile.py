"""`cohabit tile`: plans how the arrays of a NumPy program are tiled over workers, and runs it."""

import argparse
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cohabit.planner.errors import format_bytes
from cohabit.server.config.sizes import parse_memory
from cohabit.server.config.sources import typed
from cohabit.server.config.values import integer
from cohabit.server.errors import ConfigError
from cohabit.server.format import make_table, milliseconds, print_table
from cohabit.server.script import function_of_script

if TYPE_CHECKING:  # importing the planner is slow, and --help does not need it
    from cohabit.planner.tiling import TilingGraph, TilingPlan

_GLYPHS = {"row": "▤", "column": "▥", "block": "▦", "transposed block": "▦", "duplicated": "▤▥", "replicated": "■"}
_COMPARED = ("exact", "greedy", "recursive", "row", "column", "worst")
SEARCH_NAMES = (*_COMPARED, "brute-force")
"""The keys of `planner.tiling.SEARCHES`."""


_EXAMPLES = """examples:
  cohabit tile examples/tiling_regression.py:program --workers 4
  cohabit tile examples/tiling_regression.py:program --workers 4 --run
  torchrun --nproc-per-node 4 -m cohabit.server.cli tile script.py:program --workers 4

FUNCTION takes nothing, makes its arrays with `cohabit.planner.tiling.newarray`, computes with NumPy's functions and
returns arrays. The script is run.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Choose how the arrays of a NumPy program are tiled over workers so that the fewest bytes move between them,\n"
        "and run the program on torch.distributed."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "program", metavar="SCRIPT:FUNCTION", help="a Python file and the function that builds the program"
    )
    parser.add_argument(
        "--workers", type=typed(integer(1, 4096)), default=4, metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--search", default="exact", choices=SEARCH_NAMES, help="how to choose tilings (default: %(default)s)"
    )
    parser.add_argument(
        "--copies",
        type=typed(parse_memory),
        metavar="SIZE",
        help="memory per worker for copies of arrays: 64MiB, or a share of its part of the inputs (default: 10%%)",
    )
    parser.add_argument(
        "--run",
        dest="execute",
        action="store_true",
        help="run the program in local processes; processes of torchrun always run it",
    )


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Plan and, if asked, run a program. Raises ConfigError and the planner's errors."""
    from cohabit.planner.tiling import plan_tiling

    graph = _graph(options.program, options.workers, options.copies)
    plan = plan_tiling(graph, options.search)
    runs = None
    if options.execute or "TORCHELASTIC_RUN_ID" in os.environ:
        _require_data(options.program, graph)
        from cohabit.runtime.tiling.worker import start

        task = functools.partial(_run, options.program, options.workers, options.copies, plan.picks)
        runs = start(task, options.workers)
        if runs is None:  # another of torchrun's processes reports
            return 0
    _draw(plan, out)
    table = make_table("tiling", "on the wire", "read and updated", "copies per worker", left=("tiling",))
    for search in dict.fromkeys((options.search, *_COMPARED)):
        other = plan if search == options.search else plan_tiling(graph, search)
        sizes = (other.moved.wire, other.moved.logical, other.extra_bytes)
        table.add_row(search, *map(format_bytes, sizes), style="bold" if other is plan else None)
    out.print(table)
    if runs is not None:
        moved, seconds = runs
        out.print(
            f"run: {milliseconds(seconds)}, {format_bytes(moved.wire)} on the wire ({moved.wire} bytes counted,"
            f" {plan.moved.wire} predicted)",
            soft_wrap=True,
        )
    return 0


def _require_data(program: str, graph: "TilingGraph") -> None:
    """Raise ConfigError if an input was made from a shape alone."""
    from cohabit.planner.tiling.expressions import NewArray

    for expression in graph.expressions:
        operator = expression.operator
        if isinstance(operator, NewArray) and operator.data is None:
            raise ConfigError(
                f"{program}: array {expression.name or expression.shape} has a shape and no data, so it can be planned"
                " but not run; pass an array to `newarray`, or leave out --run"
            )


def _graph(program: str, workers: int, copies: Any) -> "TilingGraph":
    """Capture a program. `copies` is the memory per worker for copies, or a share of its part of the inputs."""
    from cohabit.planner.tiling import LazyArray, TilingGraph

    function = function_of_script(program)
    outputs = _called(function)
    arrays = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if not arrays or not all(isinstance(array, LazyArray) for array in arrays):
        raise ConfigError(
            f"{program}: {function.__name__} must return arrays made from `newarray`, and returned {outputs!r:.60}"
        )
    graph = TilingGraph.of(arrays, workers)
    limit = None if copies is None else copies.of(graph.input_bytes // workers)
    return TilingGraph.of(arrays, workers, limit)


def _called(function: Any) -> Any:
    """Call a program, and name its arrays after its local variables at return."""
    from cohabit.planner.tiling import LazyArray

    def name_arrays(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is function.__code__:
            for name, value in frame.f_locals.items():
                if isinstance(value, LazyArray) and not value.expression.name:
                    value.expression.name = name

    sys.setprofile(name_arrays)
    try:
        return function()
    finally:
        sys.setprofile(None)


def _run(program: str, workers: int, copies: Any, picks: tuple[int, ...], worker: Any) -> Any:
    from cohabit.planner.tiling import TilingPlan
    from cohabit.runtime.tiling.execute import measured

    _, moved, seconds = measured(TilingPlan(_graph(program, workers, copies), picks), worker, repeats=2)
    return moved, seconds[-1]  # the first run loads parts of torch


def _draw(plan: "TilingPlan", out: Console) -> None:
    """Print a line per array: its shape, its tiling, and the bytes on the wire for its inputs and its partial sums."""
    from cohabit.planner.tiling.expressions import Fold, JoinUpdate, Map, Scan, View

    graph, names = plan.graph, dict[int, str]()
    for number, expression in enumerate(graph.expressions):
        operator = expression.operator
        function = type(operator).__name__.lower()
        if isinstance(operator, Map | Fold | Scan | JoinUpdate):
            function = operator.call.name
        names[id(expression)] = expression.name or f"{function} {number}"
    columns = ("array", "shape", "tiling", "moves")
    table = make_table(*columns, left=columns)
    for expression in (e for e in graph.expressions if not isinstance(e.operator, View)):
        moves = [
            f"{'sum' if edge.reads is expression else names[id(edge.reads)]} {format_bytes(moved.wire)}"
            for edge, moved in zip(graph.edges, plan.edges, strict=True)
            if edge.by is expression and moved.wire
        ]
        shape = " x ".join(map(str, expression.shape)) or "scalar"
        tiling = plan.tiling(expression).name
        table.add_row(names[id(expression)], shape, f"{_GLYPHS[tiling]:<2} {tiling}", ", ".join(moves) or "-")
    print_table(out, table, title=f"{len(graph.expressions)} arrays, {graph.workers} workers")

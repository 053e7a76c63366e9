"""`cohabit tile`: plans how the arrays of a NumPy program are tiled over workers, draws it, and runs it."""

import argparse
import functools
import inspect
import math
import os
import runpy
import sys
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from cohabit.planner.errors import InfeasibleBudget, format_bytes
from cohabit.planner.tiling.arrays import Expression, JoinUpdate, LazyArray, View
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import TilingPlan, plan_tiling
from cohabit.server.errors import ConfigError
from cohabit.server.tools.files import write_file
from cohabit.server.tools.format import make_table, milliseconds

_GLYPHS = {"row": "▤", "column": "▥", "block": "▦", "transposed block": "▦", "duplicated": "▤▥", "replicated": "■"}
_COLOURS = ("#4878a8", "#d1823d", "#5f9e62", "#a8585c", "#8671a8", "#8a7460", "#c27ba8", "#8c8c8c")
_COMPARED = ("exact", "greedy", "recursive", "row", "column", "worst")


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Plan, draw and, if asked, run a program. Raises ConfigError and the planner's errors."""
    graph = _graph(options.program, options.workers, options.copies)
    plan = plan_tiling(graph, options.search)
    runs = None
    if options.execute or "TORCHELASTIC_RUN_ID" in os.environ:
        from cohabit.runtime.tiling.worker import start

        task = functools.partial(_run, options.program, options.workers, options.copies, plan.picks)
        runs = start(task, options.workers)
        if runs is None:  # another process of torchrun reports
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
    if options.svg is not None:
        write_file(options.svg, drawing(plan).encode())
        errors.print(f"{options.svg}: {format_bytes(options.svg.stat().st_size)}", markup=False, highlight=False)
    return 0


def plan_devices(options: argparse.Namespace, out: Console) -> int:
    """Split a model's weights over devices, exactly and as Megatron-LM does.

    Raises InfeasibleBudget for less memory than an even share.
    """
    from cohabit.runtime.tiling.model import by_hand, read_model
    from cohabit.server.models.repository import find

    if options.model is None:
        raise ConfigError("--devices: give a MODEL; a graph of `cohabit plan` has no shapes")
    source, devices, batch = find(options.model), options.devices, (options.batch_sizes or (1,))[0]
    model = read_model(source.path, batch, devices)
    share = -(-model.weight_bytes // devices)
    columns = ("memory", "tiling", "bytes per request", "weights per device")
    title = f"{source.name} at batch {batch} on {devices} devices, {format_bytes(model.weight_bytes)} of weights"
    table = make_table(*columns, left=("tiling",), title=title)
    for memory in options.memory or (None,):
        limit = share // 10 if memory is None else memory.size.of(model.weight_bytes) - share
        if limit < 0:
            raise InfeasibleBudget(source.name, None, limit + share, share)
        graph = TilingGraph.of(model.outputs, devices, limit, frees_results=True)
        for name, plan in (("exact", plan_tiling(graph)), ("Megatron-LM's", by_hand(model, devices))):
            sizes = (format_bytes(share + limit), name, format_bytes(plan.moved.wire))
            table.add_row(*sizes, format_bytes(share + plan.extra_bytes))
    out.print(table)
    return 0


def _graph(program: str, workers: int, copies: Any) -> TilingGraph:
    """Capture a program. `copies` is the memory per worker for copies, or a share of its part of the inputs."""
    path, _, name = program.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError(f"{program}: there is no file {path!r}; write SCRIPT.py:FUNCTION")
    function = runpy.run_path(path).get(name)
    if not inspect.isfunction(function):
        raise ConfigError(f"{program}: {path} defines no function {name!r}")
    outputs = _called(function)
    arrays = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if not arrays or not all(isinstance(array, LazyArray) for array in arrays):
        raise ConfigError(
            f"{program}: {name} must return arrays made from `newarray`, and returned {outputs!r:.60}"
        )
    graph = TilingGraph.of(arrays, workers)
    limit = None if copies is None else copies.of(graph.input_bytes // workers)
    return TilingGraph.of(arrays, workers, limit)


def _called(function: Any) -> Any:
    """Call a program, and name arrays as its local variables are named in the end."""

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
    from cohabit.runtime.tiling.execute import measured

    _, moved, seconds = measured(TilingPlan(_graph(program, workers, copies), picks), worker, repeats=2)
    return moved, seconds[-1]  # the first run loads parts of torch


def _draw(plan: TilingPlan, out: Console) -> None:
    """List the arrays with their tilings and the bytes that each input costs."""
    graph = plan.graph
    columns = ("array", "shape", "tiling", "moves")
    table = make_table(*columns, left=columns, title=f"{len(graph.expressions)} arrays, {graph.workers} workers")
    names = _names(graph)
    moves: dict[int, list[str]] = {}
    for edge, moved in zip(graph.edges, plan.edges, strict=True):
        if moved.wire:
            what = "its sum" if edge.reads is edge.by else names[id(edge.reads)]
            moves.setdefault(id(edge.by), []).append(f"{what} {format_bytes(moved.wire)}")
    for expression in graph.expressions:
        if isinstance(expression.operator, View):
            continue
        tiling = plan.tiling(expression).name
        shape = " x ".join(map(str, expression.shape)) or "scalar"
        reads = ", ".join(moves.get(id(expression), ())) or "-"
        table.add_row(names[id(expression)], shape, f"{_GLYPHS[tiling]:<2} {tiling}", reads)
    out.print(table)


def _names(graph: TilingGraph) -> dict[int, str]:
    names: dict[int, str] = {}
    for number, expression in enumerate(graph.expressions):
        names[id(expression)] = expression.name or f"{_operator(expression)} {number}"
    return names


def _operator(expression: Expression) -> str:
    operator = expression.operator
    function = getattr(operator, "function", type(operator).__name__.lower())
    function = function if isinstance(function, str) else function.__name__
    return "dot" if isinstance(operator, JoinUpdate) and function == "matmul" else function


def drawing(plan: TilingPlan) -> str:
    """Draw a plan as SVG: a line per array with its tiles coloured by worker, and arcs as wide as their bytes."""
    graph, names = plan.graph, _names(plan.graph)
    shown = [e for e in graph.expressions if not isinstance(e.operator, View)]
    places = {graph.group_of(e): 60 + 34 * line for line, e in enumerate(shown)}
    for edge in graph.edges:
        if edge.target not in places:
            places[edge.target] = places[graph.group_of(edge.by)]
    most = max((m.wire for m in plan.edges), default=0)
    height = 34 * len(shown) + 70
    arcs, lines, left = [], [], 250
    for edge, moved in sorted(zip(graph.edges, plan.edges, strict=True), key=lambda pair: pair[1].wire):
        top, bottom = places[edge.source], places[edge.target]
        reach = left - min(left - 30, 24 + 0.45 * (bottom - top))
        colour, width = (
            ("#c8cdd2", 1.0) if not moved.wire else ("#d1572f", 1.5 + 6.5 * math.sqrt(moved.wire / most))
        )
        if top != bottom:
            path = f"M{left},{top} C{reach:.0f},{top} {reach:.0f},{bottom} {left},{bottom}"
            arcs.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:.1f}"/>')
    for expression in shown:
        group = graph.group_of(expression)
        y, tiling = places[group], plan.tiling(expression)
        incoming = sum(m.wire for e, m in zip(graph.edges, plan.edges, strict=True) if e.by is expression)
        shape = " x ".join(map(str, expression.shape)) or "scalar"
        lines += _tiles(graph, expression, tiling.forms, left + 14, y)
        lines.append(f'<text x="{left + 96}" y="{y + 4}" font-weight="bold">{escape(names[id(expression)])}</text>')
        lines.append(f'<text x="{left + 260}" y="{y + 4}" fill="#555">{shape}, {tiling.name}</text>')
        if incoming:
            lines.append(f'<text x="{left + 470}" y="{y + 4}" fill="#d1572f">{format_bytes(incoming)}</text>')
    title = f"{format_bytes(plan.moved.wire)} between {graph.workers} workers; colours are workers, orange moves"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 570}" height="{height}"'
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="100%" height="100%" fill="white"/><text x="20" y="28" font-size="15">{title}</text>',
            *arcs,
            *lines,
            "</svg>",
        ]
    )


def _tiles(graph: TilingGraph, expression: Expression, forms: Any, x: float, y: float) -> list[str]:
    """Draw each form of an array as a small picture of its tiles."""
    from cohabit.planner.tiling.costs import bounds

    drawn = []
    for number, form in enumerate(forms):
        scale = [n or 1 for n in (*expression.shape, 1, 1)[:2]]
        width, height = 30, 24
        for worker, tile in reversed(list(enumerate(bounds(expression.shape, form, graph.mesh)))):
            (top, bottom), (first, end) = [*tile.tolist(), (0, 1), (0, 1)][:2]
            place = (
                f'x="{x + 38 * number + width * first / scale[1]:.1f}" y="{y - 12 + height * top / scale[0]:.1f}"'
            )
            size = (
                f'width="{width * (end - first) / scale[1]:.1f}" height="{height * (bottom - top) / scale[0]:.1f}"'
            )
            colour = "#555" if set(form) == {None} else _COLOURS[worker % len(_COLOURS)]
            drawn.append(f'<rect {place} {size} fill="{colour}" stroke="white" stroke-width="0.6"/>')
    return drawn

"""`cohabit show`: a plan read from its file, checked, and drawn in the terminal or on a page."""

import sys
import tempfile
import webbrowser
from pathlib import Path

from rich.console import Console

from planner.check import check
from planner.errors import CohabitError, FormatError, format_bytes
from server.tools.files import find_graph, find_profile, read_graph, read_plan, read_profile, write_text
from server.tools.options import ShowOptions
from server.tools.page import page
from server.tools.picture import Picture, picture
from server.tools.progress import milliseconds
from server.tools.terminal import draw

_SAME = 1e-6
"""Relative difference of predicted latencies that rounding explains."""


def run(options: ShowOptions, out: Console, errors: Console) -> int:
    """Draw a plan. Raises ConfigError for files that are not there, FormatError for bad ones."""
    shown = load(options)
    if (doubt := doubts(shown)) is not None:
        errors.print(f"cohabit: {options.plan}: {doubt}", markup=False, soft_wrap=True)
    if options.html == Path("-"):
        sys.stdout.write(page(shown))
        return 0
    draw(shown, out)
    target = options.html
    if target is None and options.open_it:
        target = Path(tempfile.mkdtemp(prefix="cohabit-")) / f"{options.plan.stem}.html"
    if target is not None:
        write_text(target, page(shown))
        errors.print(
            f"{target}: {format_bytes(target.stat().st_size)}", markup=False, soft_wrap=True, highlight=False
        )
        if options.open_it and not webbrowser.open(target.resolve().as_uri()):
            errors.print(f"cohabit: no browser to open {target} with", markup=False, soft_wrap=True)
    return 0


def load(options: ShowOptions) -> Picture:
    """Read a plan with its graph and profile, and check it."""
    plan = read_plan(options.plan)
    graph = find_graph(plan, options.plan) if options.graph is None else read_graph(options.graph)
    profile = find_profile(plan, options.plan) if options.profile is None else read_profile(options.profile, graph)
    try:
        check(graph, profile, plan)
    except CohabitError as error:
        raise FormatError(f"{options.plan}: {error}") from error
    return picture(graph, profile, plan)


def doubts(shown: Picture) -> str | None:
    """Whether the plan was changed since its latency was noted in it."""
    about, latency_s = shown.plan.provenance, shown.timeline.latency_s
    if about is None or abs(about.latency_s - latency_s) <= _SAME * latency_s:
        return None
    return (
        f"the file promises {milliseconds(about.latency_s)}, its steps take {milliseconds(latency_s)};"
        " it was changed after it was made, or made by another version"
    )

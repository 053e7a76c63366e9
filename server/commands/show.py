"""`cohabit show`: checks a plan and draws it in the terminal or as an HTML page."""

import argparse
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import cohabit.planner.graph
import cohabit.planner.profile
from cohabit.page.html import report_page
from cohabit.planner.check import check
from cohabit.planner.errors import CohabitError, FormatError, format_bytes
from cohabit.server.commands.planning.files import find, read_graph, read_plan, read_profile, write_file
from cohabit.server.errors import ConfigError
from cohabit.server.format import PLAN_WORDS, milliseconds

if TYPE_CHECKING:
    from cohabit.server.view.analysis import PlanAnalysis

_SAME = 1e-6
"""Relative difference of predicted latencies that rounding may cause."""


_EXAMPLES = """examples:
  cohabit show plans/resnet50-b1-64MiB-best.plan.json
  cohabit show plans/resnet50-b1-64MiB-best.plan.json --html plan.html
  cohabit show plans/resnet50-b1-64MiB-best.plan.json --open

The graph and the profile are found in the plan's folder by the fingerprints in the plan.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check a plan and draw it: lanes and memory over time, stalls and copies."
    parser.epilog = _EXAMPLES
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file that `cohabit plan` wrote")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="its graph (default: found in the same folder)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="its profile (default: likewise)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page; - for standard output")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Draw a plan. Raises ConfigError for missing files, FormatError for invalid ones."""
    from cohabit.server.view.plan_document import plan_document
    from cohabit.server.view.terminal import draw

    if options.open and options.html == Path("-"):
        raise ConfigError("--open: a page on standard output cannot be opened; give --html a file")
    analysis = _load(options)
    about, latency_s = analysis.plan.provenance, analysis.timeline.latency_s
    if about is not None and abs(about.latency_s - latency_s) > _SAME * latency_s:
        errors.print(
            f"cohabit: {options.plan}: the file promises {milliseconds(about.latency_s)}, its steps take"
            f" {milliseconds(latency_s)}; it was changed after it was made, or made by another version",
            markup=False,
            soft_wrap=True,
        )
    if options.html == Path("-"):
        sys.stdout.write(report_page(plan_document(analysis)))
        return 0
    draw(analysis, out)
    out.print(PLAN_WORDS, style="dim", soft_wrap=True)
    target = options.html
    if target is None and options.open:
        target = Path(tempfile.mkdtemp(prefix="cohabit-")) / f"{options.plan.stem}.html"
    if target is not None:
        write_file(target, report_page(plan_document(analysis)).encode())
        size = format_bytes(target.stat().st_size)
        errors.print(f"{target}: {size}", markup=False, soft_wrap=True, highlight=False)
        if options.open and not webbrowser.open(target.resolve().as_uri()):
            errors.print(f"cohabit: no browser to open {target} with", markup=False, soft_wrap=True)
    return 0


def _load(options: argparse.Namespace) -> "PlanAnalysis":
    from cohabit.server.view.analysis import analyze

    plan, path = read_plan(options.plan), options.plan
    graph = (
        read_graph(options.graph)
        if options.graph
        else find("graph", plan.graph, path, cohabit.planner.graph.decode)
    )
    if options.profile:
        profile = read_profile(options.profile, graph)
    else:
        profile = find("profile", plan.profile, path, cohabit.planner.profile.decode)
    try:
        check(graph, profile, plan)
    except CohabitError as error:
        raise FormatError(f"{options.plan}: {error}") from error
    return analyze(graph, profile, plan)

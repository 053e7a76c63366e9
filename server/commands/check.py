"""`cohabit check`: says whether a model can be served, in how much memory, and why not."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cohabit.planner.errors import bucket_words, format_bytes
from cohabit.server.commands.planning.flags import MEASURING, MODEL_HELP, add_measuring, budgets
from cohabit.server.config.sources import config_of, given, typed
from cohabit.server.format import disturbed, gap, make_table, milliseconds, percent, tensor_table
from cohabit.server.repository.scan import find, require_archive

if TYPE_CHECKING:
    from cohabit.server.deploy.servability import MemoryReport, ServabilityReport

_FORMS = {
    "plain": "with weights as exported",
    "transposed": "transposed",
    "packed": "packed for oneDNN",
    "int8": "in int8",
}
"""Forms of linear layers, as text."""
_LARGEST_TOLERANCE = 0.05
"""Of any type: a larger difference was accepted because the archive's own output changes as much by rounding."""
_EXAMPLES = """examples:
  cohabit check models/resnet50
  cohabit check models/resnet50 --memory 64MiB,25%
  cohabit check model.pt2 --json

The model is lowered and measured as `cohabit serve` does it at its first start, which finds the results in the
cache. Exit status: 0 if the model can be served, and in every memory size of --memory; 1 if not.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say whether a model can be served and in how much memory: its inputs and outputs, the least memory, and what\n"
        "each memory size is predicted to cost in latency."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("model", type=Path, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--memory",
        type=typed(budgets),
        default=(),
        metavar="SIZE,...",
        help="device memory to check: 64MiB, 82MB, or 25%% of its weights (default: the least, and some shares)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    add_measuring(parser, "batch_sizes")


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Check a model. Returns 0 if it can be served, in every memory size that was given; else 1."""
    settings = given(options, (*MEASURING, "batch_sizes"))
    config = config_of({"repository": str(options.model), "memory": "1B", **settings})
    if not options.model.exists():
        find(options.model)  # raises
    if not options.json:
        require_archive(options.model)
    from cohabit.planner.compiled import interpreted

    # Few plans, each the first feasible one: compiling the planner for them would take half a minute.
    with interpreted(), errors.status(Text(f"{options.model}: starting torch")) as status:
        from cohabit.server.deploy.servability import report

        sizes = [budget.size for budget in options.memory]
        found = report(options.model, config, sizes, lambda stage: status.update(Text(f"{options.model}: {stage}")))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _show(found, out)
    return 0 if found.servable else 1


def _show(found: "ServabilityReport", out: Console) -> None:
    for kind, fields in (("refused", found.refused_fields), ("ignored", found.ignored_fields)):
        for field, reason in fields.items():
            out.print(f"config.pbtxt: {field} is {kind}: {reason}", soft_wrap=True)
    if found.info is not None and found.servable and found.memory is None:
        out.print(tensor_table(found.info))
        fits = ": its steps fit one another" if found.info.platform == "ensemble" else ""
        out.print(f"{found.name} has platform {found.info.platform}, and can be served{fits}")
        return
    if found.info is None or found.memory is None:
        out.print(f"{found.name} cannot be served: {found.reason}", soft_wrap=True)
        return
    memory = found.memory
    # The model as lowered, which is the same for every memory size.
    out.print(tensor_table(found.info))
    out.print(
        f"weights       {format_bytes(memory.weight_bytes)}: {format_bytes(memory.swappable_bytes)} can be swapped,"
        f" {format_bytes(memory.table_bytes)} are tables in host memory"
    )
    if found.stored is not None:
        out.print(f"stored        {found.stored}", soft_wrap=True)
    if found.linear_forms:
        forms = ", ".join(f"{count} {_FORMS[form]}" for form, count in sorted(found.linear_forms.items()))
        out.print(f"linear layers {forms}", soft_wrap=True)
    out.print(f"batch sizes   {', '.join(map(str, found.batch_sizes))}")
    if found.interaction is not None:
        out.print(
            f"rows          influence one another, so requests run alone: {found.interaction}", soft_wrap=True
        )
    else:
        out.print("rows          independent, so requests are padded and batched")
    if found.random_ops:
        from cohabit.server.deploy.notices import FORGOTTEN_EVAL, is_training

        hint = f"; {FORGOTTEN_EVAL}" if is_training(found.random_ops) else ""
        out.print(f"random        numbers are drawn by {', '.join(found.random_ops)}{hint}", soft_wrap=True)
    if found.changed_inputs:
        from cohabit.server.deploy.notices import CHANGES_ARE_LOST

        out.print(f"changed       {', '.join(found.changed_inputs)}: {CHANGES_ARE_LOST}", soft_wrap=True)
    _show_validation(found, out)
    # Memory, and the cost of having less.
    offloaded = memory.least_without_offloading_bytes
    note = (
        f", with activations offloaded; {format_bytes(offloaded)} without" if offloaded > memory.least_bytes else ""
    )
    out.print(f"least memory  {format_bytes(memory.least_bytes)} ({memory.least_bytes} bytes){note}")
    out.print(f"workspace     {memory.activations}", soft_wrap=True)
    out.print(_budgets(memory))
    if refused := [budget for budget in memory.budgets if budget.reason is not None]:  # all for the same reason
        sizes = ", ".join(format_bytes(budget.memory_bytes) for budget in refused)
        out.print(f"not enough    {sizes}: {refused[-1].reason}", soft_wrap=True)
    if any(budget.most_batch not in (None, max(found.batch_sizes)) for budget in memory.budgets):
        out.print("batches       that are not planned run in parts: their activations take memory from parameters")
    if dynamic := [bucket for bucket in memory.activation_bytes if "x" in bucket]:
        out.print(f"sizes         {dynamic[-1]} is batch {bucket_words(dynamic[-1])}")
    from cohabit.planner.profile import NOISY

    if memory.noise > NOISY:
        out.print(f"times         {disturbed(memory.noise)}", soft_wrap=True)
    verdict = "can be served" if found.servable else "cannot be served in every memory size of --memory"
    out.print(f"{found.name} {verdict}")


def _show_validation(found: "ServabilityReport", out: Console) -> None:
    validation = found.validation
    if validation is None:
        return
    if validation.unchecked is not None:
        out.print(f"archive       not compared with it: {validation.unchecked}", soft_wrap=True)
    else:
        said = f"{validation.runs} sets of inputs, largest difference {validation.largest:.0e}"
        as_rounding = "; rounding errors alone change it as much" if validation.largest > _LARGEST_TOLERANCE else ""
        out.print(
            f"archive       compared with it on {said} of an output's largest element{as_rounding}", soft_wrap=True
        )
    for left_out in validation.left_out:
        out.print(f"left out      rewrite {left_out}", soft_wrap=True)


def _budgets(memory: "MemoryReport") -> Table:
    """List each memory size's partition and workspace, and its predicted latencies relative to a resident model."""
    smallest, *_, largest = [*memory.resident_s, *memory.resident_s]
    buckets = dict.fromkeys((smallest, largest))
    timed = [heading for bucket in buckets for heading in (f"batch {bucket}", "over resident")]
    table = make_table("memory", "of weights", "partition", "workspace", "batches", *timed)
    for budget in memory.budgets:
        share = percent(budget.memory_bytes / memory.weight_bytes) if memory.weight_bytes else "-"
        row = [format_bytes(budget.memory_bytes), share]
        if budget.partition_bytes is None or budget.workspace_bytes is None:
            row += ["does not fit"]
        else:
            row += [format_bytes(budget.partition_bytes), format_bytes(budget.workspace_bytes)]
            row.append(f"to {budget.most_batch}")
            for bucket in buckets:
                if bucket not in budget.latency_s:
                    row += ["in parts", ""]
                    continue
                row += [
                    milliseconds(budget.latency_s[bucket]),
                    gap(budget.latency_s[bucket], memory.resident_s[bucket]),
                ]
        table.add_row(*row)
    return table

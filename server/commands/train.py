"""`cohabit train`: trains the model of a script within a memory budget, with checkpoints."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.planner.memory import parse_share, parse_size
from cohabit.server.commands import EXIT_FAILED, EXIT_INTERRUPTED
from cohabit.server.config.sources import typed
from cohabit.server.config.values import integer
from cohabit.server.errors import ConfigError
from cohabit.server.script import function_of_script

if TYPE_CHECKING:
    from cohabit.runtime.training.loop import StepReport, Training, TrainingLoop

_EXAMPLES = """examples:
  cohabit train script.py:make_step --memory 2GiB --store file --steps 1000 --checkpoint run --every 100
  cohabit train script.py:make_step --memory 60% --steps 1000 --checkpoint run --resume

FUNCTION takes nothing and returns (model, optimizer, loss, batches), or (model, optimizer, loss, batches, scheduler).
`loss(model, *batch)` returns the number to minimise, as a tensor. `batches` is an iterable of batches, each a tuple of
arguments or a single one; it is begun again when it ends. The scheduler of the learning rate is stepped after each
step. The script is run. Other loops run in Python, under `cohabit.budget`.

A checkpoint has parameters, buffers, the optimizer's state, the random generators of torch, numpy and Python, and the
number of steps. --resume calls FUNCTION, skips as many batches as steps were done, and steps the scheduler as often.
The losses are then those of a run that was not interrupted, if FUNCTION makes the same batches every time: set seeds in
it, and give a shuffling DataLoader a generator of its own.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a model within a memory budget: tensors that do not fit are swapped out while they are not needed.\n"
        "The losses are the same for every budget."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "program",
        metavar="SCRIPT:FUNCTION",
        help="a Python file, and its function that returns model, optimizer, loss and batches",
    )
    parser.add_argument(
        "--memory",
        type=typed(_memory),
        default="60%",
        metavar="SIZE",
        help="memory for tensors: 2GiB, or a percentage of the first step's peak, which then runs unlimited;"
        " '3GiB total' limits the whole process, and needs --store file (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=typed(integer(1, 10**9 - 1)), metavar="N", required=True, help="steps to take in all"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", required=True, help="folder for checkpoints, which are all kept"
    )
    parser.add_argument(
        "--every",
        type=typed(integer(1, 10**9 - 1)),
        default=100,
        metavar="N",
        help="steps between two checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint in the folder, if any"
    )
    parser.add_argument(
        "--store",
        choices=("ram", "file"),
        default="file",
        help="where evicted tensors are kept: a file in the checkpoint folder, or RAM, which saves no memory"
        " (default: %(default)s)",
    )


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Train. Raises ConfigError, FormatError, and the errors of `cohabit.budget`."""
    from cohabit.runtime.training.budget import budget
    from cohabit.runtime.training.loop import TrainingLoop

    newest = _newest(options.checkpoint, options.resume)
    training = _training(options.program)
    loop = TrainingLoop(training, options.checkpoint, options.steps, options.every)
    if newest is not None:
        loop.resume(newest)
        out.print(f"going on from {newest}", soft_wrap=True)
    folder = options.checkpoint if options.store == "file" else None
    bar = _bar(errors)
    task = bar.add_task("", total=options.steps, completed=loop.steps)

    def show(report: "StepReport") -> None:
        about = _described(report)
        bar.update(task, completed=report.steps, description=about)
        if report.is_saved:
            out.print(f"step {report.steps}: {about}", soft_wrap=True)

    try:
        with (
            _stopping(loop, errors),
            budget(
                options.memory, training.model, training.optimizer, store=options.store, folder=folder
            ) as limits,
            bar,
        ):
            loop.run(limits, show)
    except KeyboardInterrupt:
        errors.print(f"cohabit: interrupted; {_last(loop)}", soft_wrap=True)
        return EXIT_INTERRUPTED
    except CohabitError as error:
        errors.print(f"cohabit: {error}; {_last(loop)}", markup=False, soft_wrap=True)
        return EXIT_FAILED
    except Exception:
        errors.print(_last(loop), soft_wrap=True)
        raise  # an error of the user's code
    out.print(_last(loop), soft_wrap=True)
    return EXIT_INTERRUPTED if loop.is_stopped else 0


def _newest(folder: Path, resume: bool) -> Path | None:
    """Return the newest checkpoint. Raises ConfigError if there is one and `resume` is not set."""
    from cohabit.runtime.training.loop import newest_checkpoint

    try:
        newest = newest_checkpoint(folder)
    except OSError as error:
        raise ConfigError(f"--checkpoint: {folder}: {error.strerror or error}") from error
    if newest is not None and not resume:
        raise ConfigError(f"--checkpoint: {newest} is there; give --resume to go on from it, or another folder")
    return newest


def _training(program: str) -> "Training":
    from cohabit.runtime.training.loop import Training

    made = function_of_script(program)()
    if not isinstance(made, tuple) or not 4 <= len(made) <= 5:
        raise ConfigError(
            f"{program}: it must return (model, optimizer, loss, batches) or (model, optimizer, loss, batches,"
            f" scheduler), and returned {made!r:.60}"
        )
    return Training(*made)


def _bar(errors: Console) -> Progress:
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


def _described(report: "StepReport") -> str:
    limit = "?" if report.limit_bytes is None else format_bytes(report.limit_bytes)
    return (
        f"loss {report.loss:.6g}, {report.steps_per_s:.3g} steps/s, tensors took up to"
        f" {format_bytes(report.peak_bytes)} of {limit}, {format_bytes(report.moved_bytes)} moved per step"
    )


def _last(loop: "TrainingLoop") -> str:
    return "there is no checkpoint" if loop.saved is None else f"the last checkpoint is {loop.saved}"


@contextmanager
def _stopping(loop: "TrainingLoop", errors: Console) -> Iterator[None]:
    """Let the first interrupt end the training after the current step, and the second one at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if loop.is_stopped:
            raise KeyboardInterrupt
        loop.is_stopped = True
        errors.print("stopping after this step. Interrupt again to exit now", markup=False)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _memory(text: str) -> str:
    """Check a size, a size of the whole process, or a share up to 100 %."""
    share = parse_share(text)
    if share is None:
        parse_size(text.removesuffix(" total"))
    elif not 0 < share <= 1:
        raise ValueError(f"'{text}' is out of range; a share of the step's peak lies above 0% and up to 100%")
    return text

"""`cohabit train`: trains the model of a script within a memory budget, with checkpoints."""

import argparse
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.planner.memory import parse_share, parse_size
from cohabit.server.commands import EXIT_FAILED, EXIT_INTERRUPTED
from cohabit.server.config.sources import typed
from cohabit.server.config.values import integer
from cohabit.server.errors import ConfigError
from cohabit.server.importing.script import function_of_script

if TYPE_CHECKING:
    from cohabit.runtime.training.budget import Budget

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
    newest = _newest(options.checkpoint, options.resume)
    training = _training(options.program)
    batches = _endless(training.batches)
    steps = 0
    if newest is not None:
        steps = _resume(newest, training, batches)
        out.print(f"going on from {newest.path}", soft_wrap=True)
    return _Run(options, training, out, errors, steps, None if newest is None else newest.path).run(batches)


@dataclass(frozen=True, slots=True)
class _Training:
    """The user function's return value."""

    model: Any
    optimizer: Any
    loss: Callable[..., Any]
    batches: Iterable[Any]
    scheduler: Any = None


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    path: Path
    steps: int


class _Run:
    """The steps of one call of the command."""

    def __init__(
        self,
        options: argparse.Namespace,
        training: _Training,
        out: Console,
        errors: Console,
        steps: int,
        saved: Path | None = None,
    ) -> None:
        """`steps` is the number of steps already taken. `saved` is the last checkpoint, if there is one."""
        self._options, self._training = options, training
        self._out, self._errors = out, errors
        self._steps, self._saved = steps, saved
        self._is_stopped = False
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )

    def run(self, batches: Iterator[Sequence[Any]]) -> int:
        """Take the remaining steps, and write checkpoints. Returns the exit status."""
        from cohabit.runtime.training.budget import budget

        training, options = self._training, self._options
        folder = options.checkpoint if options.store == "file" else None
        try:
            with (
                self._stopping(),
                budget(
                    options.memory, training.model, training.optimizer, store=options.store, folder=folder
                ) as limits,
                self._bar,
            ):
                self._take_steps(batches, limits)
        except KeyboardInterrupt:
            self._errors.print(f"cohabit: interrupted; {self._last()}", soft_wrap=True)
            return EXIT_INTERRUPTED
        except CohabitError as error:
            self._errors.print(f"cohabit: {error}; {self._last()}", markup=False, soft_wrap=True)
            return EXIT_FAILED
        except Exception:
            self._errors.print(self._last(), soft_wrap=True)
            raise  # an error of the user's code
        self._out.print(self._last(), soft_wrap=True)
        return EXIT_INTERRUPTED if self._is_stopped else 0

    def _take_steps(self, batches: Iterator[Sequence[Any]], limits: "Budget") -> None:
        total, scheduler = self._options.steps, self._training.scheduler
        task = self._bar.add_task("", total=total, completed=self._steps)
        taken, start_s = 0, time.perf_counter()
        while self._steps < total and not self._is_stopped:
            try:
                batch = next(batches)
            except StopIteration:
                raise ConfigError(f"{self._options.program}: there are no batches") from None
            except Exception:  # between two steps, the state is consistent
                with suppress(CohabitError):
                    self._save()
                raise
            moved_bytes = limits.moved_bytes
            loss = self._step(batch)
            if scheduler is not None:
                scheduler.step()
            self._steps, taken = self._steps + 1, taken + 1
            rate = taken / (time.perf_counter() - start_s)
            moved = format_bytes(limits.moved_bytes - moved_bytes)
            about = (
                f"loss {loss:.6g}, {rate:.3g} steps/s, tensors took up to {format_bytes(limits.peak_bytes)}"
                f" of {'?' if limits.limit_bytes is None else format_bytes(limits.limit_bytes)}, {moved} moved per step"
            )
            self._bar.update(task, completed=self._steps, description=about)
            if self._steps % self._options.every == 0 or self._steps == total:
                self._save()
                self._out.print(f"step {self._steps}: {about}", soft_wrap=True)
        if self._is_stopped:
            self._save()

    def _step(self, batch: Sequence[Any]) -> float:
        optimizer = self._training.optimizer
        optimizer.zero_grad()
        loss = self._training.loss(self._training.model, *batch)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    def _save(self) -> None:
        from cohabit.runtime.training.checkpoint import write_checkpoint

        path = path_of(self._options.checkpoint, self._steps)
        if self._steps and path != self._saved:
            try:
                write_checkpoint(path, self._steps, self._training.model, self._training.optimizer)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from error
            self._saved = path

    def _last(self) -> str:
        return "there is no checkpoint" if self._saved is None else f"the last checkpoint is {self._saved}"

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let the first interrupt end the training after the current step, and the second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._is_stopped:
                raise KeyboardInterrupt
            self._is_stopped = True
            self._errors.print("stopping after this step. Interrupt again to exit now", markup=False)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def path_of(folder: Path, steps: int) -> Path:
    """Return the name of the checkpoint after a number of steps."""
    return folder / f"step-{steps:09}.safetensors"


def _resume(newest: _Checkpoint, training: _Training, batches: Iterator[Any]) -> int:
    """Load a checkpoint; return the number of its steps."""
    from cohabit.runtime.training.checkpoint import read_checkpoint

    for _ in range(newest.steps):
        next(batches, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about scheduler steps before the first optimizer step
        for _ in range(newest.steps if training.scheduler is not None else 0):
            training.scheduler.step()
    # Last, because skipped batches may draw random numbers, and the optimizer's settings replace the scheduler's rate.
    steps = read_checkpoint(newest.path, training.model, training.optimizer)
    if steps != newest.steps:
        raise ConfigError(
            f"{newest.path}: this file was renamed: it holds step {steps}; give it the name of that step"
        )
    return steps


def _newest(folder: Path, resume: bool) -> _Checkpoint | None:
    """Return the newest checkpoint. Raises ConfigError if there is one and `resume` is not set."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {int(p.stem[5:]): p for p in folder.glob("step-*.safetensors") if p.stem[5:].isdecimal()}
    except OSError as error:
        raise ConfigError(f"--checkpoint: {folder}: {error.strerror or error}") from error
    if not found:
        return None
    newest = _Checkpoint(found[max(found)], max(found))
    if not resume:
        raise ConfigError(
            f"--checkpoint: {newest.path} is there; give --resume to go on from it, or another folder"
        )
    return newest


def _training(program: str) -> _Training:
    made = function_of_script(program)()
    if not isinstance(made, tuple) or not 4 <= len(made) <= 5:
        raise ConfigError(
            f"{program}: it must return (model, optimizer, loss, batches) or (model, optimizer, loss, batches,"
            f" scheduler), and returned {made!r:.60}"
        )
    return _Training(*made)


def _endless(batches: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the batches repeatedly, each as a tuple. Raises ConfigError if they cannot be repeated."""
    count, before = 0, 0
    while True:
        for batch in batches:
            count += 1
            yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if count == before:
            if count == 0:
                return
            raise ConfigError(
                f"the batches ended after {count}, and cannot be begun again; return a list, a DataLoader, or an"
                " iterator without an end"
            )
        before = count


def _memory(text: str) -> str:
    """Check a size, a size of the whole process, or a share up to 100 %."""
    share = parse_share(text)
    if share is None:
        parse_size(text.removesuffix(" total"))
    elif not 0 < share <= 1:
        raise ValueError(f"'{text}' is out of range; a share of the step's peak lies above 0% and up to 100%")
    return text

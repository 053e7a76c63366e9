"""`cohabit train`: trains the model of a script within a memory budget, with checkpoints."""

import argparse
import signal
import time
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
from cohabit.planner.search.registry import BASELINES, COUNTED
from cohabit.server.commands import EXIT_FAILED, EXIT_INTERRUPTED
from cohabit.server.commands.planning.files import write_graph, write_plan, write_profile
from cohabit.server.config.sources import typed
from cohabit.server.config.values import integer, seconds
from cohabit.server.errors import ConfigError
from cohabit.server.format import make_table, milliseconds, print_table
from cohabit.server.importing.script import function_of_script

if TYPE_CHECKING:
    from cohabit.runtime.training.trainer import Trainer

_EXAMPLES = """examples:
  cohabit train script.py:make_step --memory 60% --steps 1000 --checkpoint run --every 100
  cohabit train script.py:make_step --memory 60% --steps 1000 --checkpoint run --resume
  cohabit train script.py:make_step --memory 2GiB --store file --steps 1000 --checkpoint run
  cohabit train script.py:make_step --memory 60% --plan-only plans && cohabit show plans/training-*.plan.json

FUNCTION takes nothing and returns (model, optimizer, loss, batches), or (model, optimizer, loss, batches, scheduler).
`loss(model, *batch)` returns the number to minimise, as a tensor. `batches` is an iterable of tuples of tensors, all of
the first one's shapes; it is begun again when it ends. The scheduler of the learning rate is stepped after each step.
The script is run.

A checkpoint has parameters, buffers, the optimizer's state, the state of torch's random generator, and the number of
steps. --resume calls FUNCTION, skips as many batches as steps were done, and steps the scheduler as often. The losses
are then those of a run that was not interrupted, if FUNCTION makes the same batches every time: set seeds in it, and
give a shuffling DataLoader a generator of its own.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a model within a memory budget: what does not fit is swapped out, or computed again, as a plan says.\n"
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
        help="memory for a step: 2GiB, or a share of what it needs if nothing leaves memory (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda or cuda:N; --memory is then the device's (default: %(default)s)"
    )
    parser.add_argument("--steps", type=typed(integer(1, 10**9 - 1)), metavar="N", help="steps to take in all")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder for checkpoints, which are all kept")
    parser.add_argument(
        "--every",
        type=typed(integer(1, 10**9 - 1)),
        default=100,
        metavar="N",
        help="steps between two checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in the folder, if there is one"
    )
    parser.add_argument(
        "--store",
        choices=("ram", "file"),
        default="ram",
        help="where swapped-out tensors are kept: in RAM, or, on the CPU only, in a file in the folder of checkpoints"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--searcher",
        choices=(*COUNTED, *BASELINES),
        default="best",
        metavar="NAME",
        help=f"how to search for the plan: {', '.join((*COUNTED, *BASELINES))} (default: %(default)s)",
    )
    parser.add_argument(
        "--search-seconds",
        type=typed(seconds),
        default=20.0,
        metavar="S",
        help="seconds to search for a plan (default: %(default)s)",
    )
    parser.add_argument(
        "--plan-only",
        type=Path,
        metavar="DIR",
        help="write the plan, the graph and the profile to this folder, for `cohabit show`, and train nothing",
    )


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Plan and train. Raises ConfigError, what making a `Trainer` raises, and TrainingLost."""
    if options.plan_only is None and (options.steps is None or options.checkpoint is None):
        raise ConfigError("train: give --steps N and --checkpoint DIR, or --plan-only DIR")
    newest = None if options.plan_only is not None else _newest(options.checkpoint, options.resume)
    training = _training(options.program)
    batches = _endless(training.batches)
    first = next(batches, None)
    if first is None:
        raise ConfigError(f"{options.program}: there are no batches")
    trainer = _trainer(options, training, first, errors)
    try:
        _describe(trainer, out)
        if options.plan_only is not None:
            write_graph(options.plan_only, trainer.graph)
            write_profile(options.plan_only, trainer.graph, trainer.profile)
            path = write_plan(options.plan_only, trainer.graph, trainer.plan, options.memory, options.searcher)
            out.print(str(path), soft_wrap=True)
            return 0
        if newest is None:
            return _Run(options, training, trainer, out, errors).run(_again(first, batches))
        for _ in range(1, newest.steps):
            next(batches)
        trainer.resume(newest.path)  # after the batches, which may take random numbers
        if trainer.steps != newest.steps:
            raise ConfigError(
                f"{newest.path}: this file was renamed: it holds step {trainer.steps}; give it the name of that step"
            )
        for _ in range(newest.steps if training.scheduler is not None else 0):
            training.scheduler.step()
        out.print(f"going on from {newest.path}", soft_wrap=True)
        return _Run(options, training, trainer, out, errors, newest.path).run(batches)
    finally:
        trainer.close(sync=False)


@dataclass(frozen=True, slots=True)
class _Training:
    """What the user's function returns."""

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
        trainer: "Trainer",
        out: Console,
        errors: Console,
        saved: Path | None = None,
    ) -> None:
        """`saved` is the last checkpoint, if there is one."""
        self._options, self._training, self._trainer = options, training, trainer
        self._out, self._errors, self._saved = out, errors, saved
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
        """Take the steps that are left; write checkpoints. Returns the exit status."""
        trainer, total = self._trainer, self._options.steps
        try:
            with self._stopping(), self._bar:
                task = self._bar.add_task("", total=total, completed=trainer.steps)
                taken, start_s = 0, time.perf_counter()
                stepping_s = 0.0
                while trainer.steps < total and not self._is_stopped:
                    batch = next(batches)
                    step_s = time.perf_counter()
                    loss = self._step(batch)
                    step_s = time.perf_counter() - step_s
                    if self._training.scheduler is not None:
                        self._training.scheduler.step()
                    taken, stepping_s = taken + 1, stepping_s + step_s
                    rate = taken / (time.perf_counter() - start_s)
                    about = f"loss {loss:.6g}, {rate:.3g} steps/s, {self._against_prediction(stepping_s / taken)}"
                    self._bar.update(task, completed=trainer.steps, description=about)
                    if trainer.steps % self._options.every == 0 or trainer.steps == total:
                        self._save()
                        self._out.print(f"step {trainer.steps}: {about}", soft_wrap=True)
                if self._is_stopped:
                    self._save()
        except KeyboardInterrupt:
            self._errors.print(f"cohabit: interrupted; {self._last()}", soft_wrap=True)
            return EXIT_INTERRUPTED
        except Exception as error:
            with suppress(CohabitError):  # a training that is lost, or a full disk
                self._save()
            if not isinstance(error, CohabitError):
                self._errors.print(self._last(), soft_wrap=True)
                raise  # of the user's code
            self._errors.print(f"cohabit: {error}; {self._last()}", markup=False, soft_wrap=True)
            return EXIT_FAILED
        self._out.print(self._last(), soft_wrap=True)
        return EXIT_INTERRUPTED if self._is_stopped else 0

    def _against_prediction(self, step_s: float) -> str:
        """Compare the mean step with the prediction, which steps teach: it is no longer the table's of the start."""
        predicted_s = self._trainer.prediction.period_s
        ratio = f"{step_s / predicted_s:.2f} of the {milliseconds(predicted_s)} predicted by now"
        return f"{milliseconds(step_s)} per step, {ratio}"

    def _step(self, batch: Sequence[Any]) -> float:
        try:
            return self._trainer.step(*batch).item()
        except ValueError as error:  # its form is another, which harms nothing
            raise ConfigError(
                f"batch {self._trainer.steps + 1}: {error}; leave out a smaller last batch (drop_last=True)"
            ) from error

    def _save(self) -> None:
        path = path_of(self._options.checkpoint, self._trainer.steps)
        if self._trainer.steps and path != self._saved:
            try:
                self._trainer.save_checkpoint(path)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
            self._saved = path

    def _last(self) -> str:
        return "there is no checkpoint" if self._saved is None else f"the last checkpoint is {self._saved}"

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Have the first interrupt end the training after its step, and the second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._is_stopped = True
            self._errors.print("stopping after this step. Interrupt again to exit now", markup=False)
            signal.signal(number, signal.default_int_handler)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def path_of(folder: Path, steps: int) -> Path:
    """Return the name of the checkpoint after a number of steps."""
    return folder / f"step-{steps:09}.safetensors"


def _newest(folder: Path, resume: bool) -> _Checkpoint | None:
    """Return the newest checkpoint. Raises ConfigError if there is one and training is to begin anew."""
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
    """Yield the batches again and again, each as a tuple. Raises ConfigError once there are none any more."""
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


def _again(first: tuple[Any, ...], batches: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    yield first
    yield from batches


def _trainer(
    options: argparse.Namespace, training: _Training, example: Sequence[Any], errors: Console
) -> "Trainer":
    from cohabit.runtime.training.trainer import Trainer

    with errors.status("starting") as status:

        def show(what: str, done: int, total: int) -> None:
            status.update(f"{what}  {done}/{total}" if total else f"{what}  {done or ''}")

        return Trainer(
            training.model,
            training.optimizer,
            training.loss,
            example,
            options.memory,
            device=options.device,
            searcher=options.searcher,
            search_seconds=options.search_seconds,
            store=options.store,
            folder=options.checkpoint,
            on_progress=show,
        )


def _describe(trainer: "Trainer", out: Console) -> None:
    """Print what the plan promises."""
    about = trainer.prediction
    columns = ("time per step", "bound", "time resident", "budget", "least to swap nothing", "swapped per step")
    table = make_table(*columns)
    times = (about.period_s, about.bound_s, about.resident_s)
    sizes = (trainer.memory_bytes, trainer.peak_bytes, trainer.swapped_bytes)
    table.add_row(*map(milliseconds, times), *map(format_bytes, sizes))
    print_table(out, table, title=f"predicted for a step of {len(trainer.graph.ops)} ops, before any was taken")


def _memory(text: str) -> str:
    """Check a size, or a share up to 100 %."""
    share = parse_share(text)
    if share is None:
        parse_size(text)
    elif not 0 < share <= 1:
        raise ValueError(f"'{text}' is out of range; a share of the step's peak lies above 0% and up to 100%")
    return text

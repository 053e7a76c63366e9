"""Training loop: steps within a memory budget, with checkpoints, and the way back to the newest one."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohabit.planner.errors import CohabitError
from cohabit.runtime.errors import UnusableTraining
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.checkpoint import read_checkpoint, write_checkpoint


@dataclass(frozen=True, slots=True)
class Training:
    """A model and what its steps need. `loss(model, *batch)` returns the number to minimise."""

    model: Any
    optimizer: Any
    loss: Callable[..., Any]
    batches: Iterable[Any]
    """Each a tuple of arguments or a single one; begun again when they end."""
    scheduler: Any = None
    """Stepped after each step."""


@dataclass(frozen=True, slots=True)
class StepReport:
    steps: int
    """Taken in all."""
    loss: float
    steps_per_s: float
    """Of this loop."""
    peak_bytes: int
    limit_bytes: int | None
    """None while the first step runs unlimited."""
    moved_bytes: int
    """Moved by this step."""
    is_saved: bool
    """Whether a checkpoint was written after it."""


class TrainingLoop:
    """Takes steps up to a total. Checkpoints are written after every `every` steps and the last one."""

    def __init__(self, training: Training, folder: Path, total: int, every: int) -> None:
        self._training, self._folder = training, folder
        self._total, self._every = total, every
        self._batches = _endless(training.batches)
        self.steps = 0
        """Steps taken, including those before a resumed checkpoint."""
        self.saved: Path | None = None
        """The last checkpoint."""
        self.is_stopped = False
        """Set by a signal handler: the loop then ends after the current step, with a checkpoint."""

    def resume(self, path: Path) -> None:
        """Load a checkpoint, and skip the batches of its steps. Raises FormatError or UnusableTraining."""
        steps = steps_of(path)
        for _ in range(steps):
            next(self._batches, None)
        scheduler = self._training.scheduler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about scheduler steps before the first optimizer step
            for _ in range(steps if scheduler is not None else 0):
                scheduler.step()
        # Last, because skipped batches may draw random numbers, and the optimizer's settings replace the scheduler's
        # rate.
        found = read_checkpoint(path, self._training.model, self._training.optimizer)
        if found != steps:
            raise UnusableTraining(
                f"{path}: this file was renamed: it holds step {found}; give it the name of that step"
            )
        self.steps, self.saved = steps, path

    def run(self, limits: Budget, on_step: Callable[[StepReport], None]) -> None:
        """Take the remaining steps. Raises UnusableTraining, errors of the budget, and those of the user's code."""
        began, start_s = self.steps, time.perf_counter()
        while self.steps < self._total and not self.is_stopped:
            try:
                batch = next(self._batches)
            except StopIteration:
                raise UnusableTraining("there are no batches") from None
            except Exception:  # between two steps, the state is consistent
                with suppress(CohabitError):
                    self._save()
                raise
            moved_bytes = limits.moved_bytes
            loss = self._step(batch)
            self.steps += 1
            is_due = self.steps % self._every == 0 or self.steps == self._total
            per_s = (self.steps - began) / (time.perf_counter() - start_s)
            moved_bytes = limits.moved_bytes - moved_bytes
            report = StepReport(self.steps, loss, per_s, limits.peak_bytes, limits.limit_bytes, moved_bytes, is_due)
            if is_due:
                self._save()
            on_step(report)
        if self.is_stopped:
            self._save()

    def _step(self, batch: tuple[Any, ...]) -> float:
        training = self._training
        training.optimizer.zero_grad()
        loss = training.loss(training.model, *batch)
        loss.backward()
        training.optimizer.step()
        value = float(loss.item())
        if training.scheduler is not None:
            training.scheduler.step()
        return value

    def _save(self) -> None:
        path = self._folder / f"step-{self.steps:09}.safetensors"
        if self.steps and path != self.saved:
            try:
                write_checkpoint(path, self.steps, self._training.model, self._training.optimizer)
            except OSError as error:
                raise UnusableTraining(f"{path} cannot be written: {error.strerror or error}") from error
            except ValueError as error:
                raise UnusableTraining(f"{path}: {error}") from error
            self.saved = path


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of the most steps; make the folder if there is none. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [path for path in folder.glob("step-*.safetensors") if path.stem[5:].isdecimal()]
    return max(found, key=steps_of, default=None)


def steps_of(path: Path) -> int:
    """Return the number of steps in a checkpoint's name."""
    return int(path.stem[5:])


def _endless(batches: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the batches repeatedly, each as a tuple. Raises UnusableTraining if they cannot be repeated."""
    count, before = 0, 0
    while True:
        for batch in batches:
            count += 1
            yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if count == before:
            if count == 0:
                return
            raise UnusableTraining(
                f"the batches ended after {count}, and cannot be begun again; return a list, a DataLoader, or an"
                " iterator without an end"
            )
        before = count

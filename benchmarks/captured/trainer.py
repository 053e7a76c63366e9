"""Trains a model whose step does not fit into memory: the plan decides what is in memory when."""

import gc
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import torch
from torch import nn

from benchmarks.captured.capture import BUCKET, Loss, OpCall, StepOptions, capture
from benchmarks.captured.checkpoint import read_checkpoint, write_checkpoint
from benchmarks.captured.device import open_training_device
from benchmarks.captured.learn import learned
from benchmarks.captured.measure import measured
from benchmarks.captured.state import TrainingState
from cohabit.planner.errors import CohabitError, FormatError, InfeasibleBudget, format_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.lifetimes import resident_bytes
from cohabit.planner.memory import parse_share, parse_size, single_budget
from cohabit.planner.plan import Plan, Provenance
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from cohabit.runtime.binding.build import draft
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import DeviceError, MemoryExceeded, UnsupportedModel
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.recording import Recording

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is, or 0 where that is not known."""

DRIFT: Final = 0.1
"""Relative change of a step's predicted time after which it is planned again (TENSILE, section IV-E)."""
SMOOTHING: Final = 0.3
"""Weight of the latest measured step in the moving averages of times."""
MEASURED_FIRST: Final = 4
"""So many steps are measured op by op, then one in `MEASURED_EVERY`."""
MEASURED_EVERY: Final = 50
PLACED_SHARE: Final = 0.95
"""A plan that the device's allocator cannot place is followed by one for such a share of its memory, ..."""
LEAST_PLACED_SHARE: Final = 0.7
"""... down to less than this share of it."""
_NOTES: Final = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""What schedulers note in a parameter group for themselves."""


class TrainingLost(DeviceError):
    """A step failed half-way, so that some parameters may be updated and others not."""


class Trainer:
    """Runs training steps of a model within a memory budget.

    Model, loss and optimizer are the user's own and stay as they are. Between steps their tensors are empty; `sync`
    fills them. A step that fails cannot be repeated: the trainer is lost, and training goes on from a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        example_batch: Sequence[torch.Tensor],
        memory: int | str = "60%",
        *,
        device: str = "cpu",
        searcher: str = "best",
        search_seconds: float = 20.0,
        store: StoreKind = "ram",
        folder: Path | None = None,
        clip_norm: float | None = None,
        micro_batches: int = 1,
        autocast: torch.dtype | None = None,
        on_progress: OnProgress = lambda what, done, total: None,
    ) -> None:
        """Capture, measure and plan a step. `loss(model, *batch)` returns a 0-d tensor.

        `memory` is a number of bytes, a size such as "2GiB", or a share of the most that a step needs, such as "60%".
        `device` is cpu, cuda or cuda:N. On CUDA, the memory is the device's, model and optimizer may be on any device,
        and their tensors stay there. `store` says where tensors go that leave memory: to RAM, or on the CPU to a file
        without a name in `folder`. With a file, the whole process gives freed memory back to the system at once:
        otherwise it takes more than the plan says.

        Raises ValueError for an invalid memory, UnsupportedModel where the step cannot be captured, InfeasibleBudget,
        which names the least memory, where it does not fit, MemoryExceeded where the device has too little, and
        DeviceError where there is none.
        """
        memory_bytes(memory, 0)  # refused now, and not after the capture
        self._optimizer = optimizer
        self._searcher, self._search_seconds, self._on_progress = searcher, search_seconds, on_progress
        self._state = TrainingState(model, optimizer)
        self._forms = forms_of(example_batch)
        self._constants = constants_of(optimizer)
        options = StepOptions(clip_norm, micro_batches, autocast)
        with self._state.undone_on_failure(optimizer), ExitStack() as undo:
            self._device = open_training_device(device, store, folder or Path(tempfile.gettempdir()))
            undo.callback(self._device.close)
            self._executor = self._device.executor
            self._lowered, calls, seconds = self._measured(model, loss, example_batch, options)
            self.graph: Graph = self._lowered.graphs[BUCKET]
            """Of one step."""
            slowdowns = self._device.slowdowns(calls, seconds)
            self.profile = Profile(
                self.graph.fingerprint, self._device.name, tuple(seconds), *self._device.links(), *slowdowns
            )
            """Times of its ops and copies: measured one by one at first, then moving averages over steps."""
            self.peak_bytes: int = self._device.budget_of(resident_bytes(self.graph))
            """The most that a step needs if nothing ever leaves memory."""
            self.memory_bytes: int = memory_bytes(memory, self.peak_bytes)
            self._tensor_bytes = self._device.tensor_bytes_in(self.memory_bytes)
            self.plan: Plan = self._search()
            """What is in memory when."""
            sizes = [tensor.nbytes for tensor in self._state.tensors.values()]
            self._buffers = dict(zip(self._state.tensors, self._device.store.spill_buffers(sizes), strict=True))
            self._device.start()
            undo.callback(self._come_back)
            self._leave()
            self._program = self._loaded()
            undo.pop_all()
        self.steps = 0
        """Steps taken, with those before the checkpoint that training went on from."""
        self._recording: Recording | None = None
        """Of the last step that was measured, until it is read."""
        self._steps_measured = 0
        self._lost: str | None = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def prediction(self) -> Provenance:
        """What the plan promises: `period_s` per step, and `bound_s`, below which no plan can be."""
        assert self.plan.provenance is not None
        return self.plan.provenance

    @property
    def swapped_bytes(self) -> int:
        """Bytes that each step copies, in both directions together."""
        return self._program.link_bytes

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        """Take one step; return the loss before its update, a 0-d tensor.

        Raises ValueError for a batch of other shapes or dtypes than the example's, UnsupportedModel where the user has
        given a tensor another form since a `sync`, or changed the optimizer's settings other than the learning rate,
        and TrainingLost.
        """
        if self._lost is not None:
            raise TrainingLost(self._lost)
        forms = forms_of(batch)
        if forms != self._forms:
            raise ValueError(f"the batch has {_text_of(forms)}; the step was captured for {_text_of(self._forms)}")
        for n, (known, found) in enumerate(zip(self._constants, constants_of(self._optimizer), strict=True)):
            if found != known:
                key = next(key for key in {**known, **found} if known.get(key) != found.get(key))
                raise UnsupportedModel(
                    f"{key} of parameter group {n} is now {found.get(key)}, the step was captured with"
                    f" {known.get(key)}: only the learning rate may change. Make a new trainer, or with OneCycleLR and"
                    " CyclicLR give cycle_momentum=False"
                )
        self._learn()
        if self._is_synced:
            self._state.regain(self._optimizer)
            self._leave()
            self._executor.load(self._program)
        is_measured = self._steps_measured < MEASURED_FIRST or self.steps % MEASURED_EVERY == 0
        rates = [torch.tensor(float(group["lr"]), dtype=torch.float64) for group in self._optimizer.param_groups]
        try:
            result = self._executor.run(
                self._program, [*batch, *rates], on_recording=self._note if is_measured else None
            )
        except BaseException as error:  # also an interrupt: some parameters may be updated and others not
            lost = self._lose(self.steps + 1, error)
            if not isinstance(error, DeviceError):
                raise
            raise lost from error
        self.steps += 1
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # or schedulers warn that no step was taken
        return result.outputs[0]

    def sync(self) -> None:
        """Bring everything into memory, so that the model's and the optimizer's state are current.

        The tensors are the user's until the next step, which takes what they then hold. Raises TrainingLost.
        """
        self._finish()
        if not self._is_synced:
            self._come_back()

    def save_checkpoint(self, path: Path) -> None:
        """Write all state to a `safetensors` file, whole or not at all. Raises OSError and TrainingLost."""
        self._finish()
        write_checkpoint(path, self.steps, self._state, self._buffers, self._device.random_state())

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same model and optimizer.

        Raises FormatError for another, or a damaged one, which leaves no training behind, and TrainingLost.
        """
        if self._lost is not None:
            raise TrainingLost(self._lost)
        if self._is_synced:
            self._state.regain(self._optimizer)
        self._executor.settle()
        self._leave()
        try:
            self.steps, random = read_checkpoint(path, self._state, self._buffers, self._device.random_state())
        except FormatError as error:
            self._lost = f"{error}; make a new trainer"
            raise
        self._device.set_random_state(random)
        self._executor.load(self._program)
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # as after a step

    def close(self, *, sync: bool = True) -> None:
        """Sync, unless the training is lost, and release everything else. Without `sync` nothing comes into memory."""
        if sync and self._lost is None:
            self.sync()
        self._device.close()

    def _measured(
        self, model: nn.Module, loss: Loss, batch: Sequence[torch.Tensor], options: StepOptions
    ) -> tuple[Lowered, list[OpCall], list[float]]:
        """Capture the step; return it with the bytes that its ops take, their calls, and each one's seconds."""
        self._on_progress("capturing the step", 0, 0)
        device = self._device
        if not device.shares_memory:
            batch = [tensor.contiguous() for tensor in batch]  # as they are copied to the device
        lowered, calls = capture(model, self._optimizer, loss, batch, self._state, options, device.device)
        trace, seconds = measured(
            lowered.traces[BUCKET],
            calls,
            device,
            lambda done, total: self._on_progress("measuring its ops", done, total),
        )
        return replace(lowered, traces={BUCKET: trace}), calls, seconds

    def _problem(self) -> Problem:
        return Problem(self.graph, self.profile, single_budget(self._tensor_bytes), objective="period")

    def _search(self) -> Plan:
        def show(evaluations: int, best_s: float, bound_s: float) -> None:
            self._on_progress(f"planning: {best_s:.3g} s per step, bound {bound_s:.3g} s", evaluations, 0)

        limit = Limit(seconds=self._search_seconds)
        try:
            plan = search(self._problem(), self._searcher, limit=limit, on_progress=show)
        except InfeasibleBudget as error:  # in the terms of what the user gives
            least_bytes = self._device.budget_of(error.least_bytes)
            raise InfeasibleBudget(error.model, error.op, self.memory_bytes, least_bytes) from error
        gc.collect()  # searchers and their generators refer to each other
        release_free_memory()
        return plan

    def _loaded(self) -> Program:
        """Bind the plan, and load what it begins with. All state has left memory.

        If the device's allocator leaves gaps that are too small for the plan's tensors, plan in less. Raises
        MemoryExceeded.
        """
        least_bytes = LEAST_PLACED_SHARE * self._tensor_bytes
        while True:
            program = self._bound()
            try:
                self._executor.load(program)
                return program
            except MemoryExceeded as error:
                self._executor.release(program)
                refused: CohabitError = error
            if self._tensor_bytes >= least_bytes:
                self._tensor_bytes = int(PLACED_SHARE * self._tensor_bytes)
                try:
                    self.plan = self._search()
                    continue
                except InfeasibleBudget as error:
                    refused = error
            raise MemoryExceeded(
                f"the device's allocator leaves gaps in the {format_bytes(self.memory_bytes)}, so that it cannot place"
                f" a plan for {format_bytes(self._tensor_bytes)} of tensors; raise the memory"
            ) from refused

    def _bound(self) -> Program:
        device, store = self._device.device, self._device.store
        drafted = draft(self._lowered, self.plan, self.profile, device)
        names = list(self._state.tensors)
        temporary = iter(store.spill_buffers([s.nbytes for s in drafted.spills if not s.is_weight]))
        offloaded = {}
        for spill in drafted.spills:
            if spill.is_weight:
                name = names[spill.tensor]
                storage = self._state.tensors[name].storage if self._device.shares_memory else None
                offloaded[spill.tensor] = OffloadedTensor(spill, self._buffers[name], device, storage)
            else:
                offloaded[spill.tensor] = OffloadedTensor(spill, next(temporary), device)
        return self._device.bind(self._lowered, drafted, offloaded, self.memory_bytes)

    def _finish(self) -> None:
        """Wait for the copies of the last step, which go on after it has returned. Raises TrainingLost."""
        if self._lost is not None:
            raise TrainingLost(self._lost)
        try:
            self._executor.finish(self._program)
        except DeviceError as error:
            raise self._lose(self.steps, error) from error

    def _lose(self, step: int, error: BaseException) -> TrainingLost:
        reason = str(error) or type(error).__name__
        self._lost = f"step {step} failed: {reason}; make a new trainer and resume from a checkpoint"
        return TrainingLost(self._lost)

    def _leave(self) -> None:
        """Have everything leave memory for its buffer, with what the user may have changed."""
        for name, tensor in self._state.tensors.items():
            tensor.save(self._buffers[name])
            tensor.hide()
        self._is_synced = False

    def _come_back(self) -> None:
        """Have everything come back to the user's tensors. All that is not there is in its buffer."""
        for name, tensor in self._state.tensors.items():
            if not tensor.is_here:
                tensor.load(self._buffers[name])
            tensor.show()
        self._is_synced = True

    def _note(self, recording: Recording) -> None:
        self._recording = recording

    def _learn(self) -> None:
        """Take the last measured step into the averages, and plan again where they have drifted."""
        recording, self._recording = self._recording, None
        if recording is None or self._is_synced:
            return
        self._steps_measured += 1
        self.profile = learned(self.profile, recording, max(1 / self._steps_measured, SMOOTHING))
        if self._steps_measured >= MEASURED_FIRST:
            self._review_plan()

    def _review_plan(self) -> None:
        """Search again where steps take another time than was promised; promise what the first steps took in any case.

        The plan in use stays if it is as good by the same times.
        """
        kept = msgspec.structs.replace(self.plan, profile=self.profile.fingerprint)
        timeline = simulate(self.graph, kept, self.profile)
        assert timeline.period_s is not None
        if abs(timeline.period_s / self.prediction.period_s - 1) > DRIFT:
            found = self._search()
            assert found.provenance is not None
            promise = found.provenance
            if promise.period_s < timeline.period_s:
                self._finish()
                self._leave()
                self._executor.release(self._program)
                self.plan = found
                try:
                    self._program = self._loaded()
                except CohabitError:  # the allocator cannot place what was found, and could place this
                    self.plan = kept
                    self._program = self._loaded()
                return
        elif self._steps_measured == MEASURED_FIRST:
            promise = msgspec.structs.replace(
                self.prediction, resident_s=self.profile.compute_s, bound_s=self._problem().bound_s
            )
        else:
            return
        promise = msgspec.structs.replace(promise, latency_s=timeline.latency_s, period_s=timeline.period_s)
        self.plan = msgspec.structs.replace(kept, provenance=promise)


def memory_bytes(memory: int | str, peak_bytes: int) -> int:
    """Return the bytes that `memory` means: a number of bytes, a size such as "2GiB", or a share of `peak_bytes`.

    Raises ValueError.
    """
    if isinstance(memory, int):
        return memory
    share = parse_share(memory)
    if share is None:
        return parse_size(memory)
    if not 0 < share <= 1:
        raise ValueError(f"'{memory}' is out of range; a share of the step's peak lies above 0% and up to 100%")
    return int(share * peak_bytes)


def forms_of(batch: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shapes and dtypes of a batch. Raises ValueError for values other than tensors."""
    for value in batch:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"a batch has tensors only, and this one a {type(value).__name__}")
    return [(t.shape, t.dtype) for t in batch]


def constants_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group that are part of the captured step. Raises UnsupportedModel."""
    for n, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                raise UnsupportedModel(f"{key} of parameter group {n} is a tensor; give it as a number")
    changing = ("params", "lr", *_NOTES)
    return [{k: v for k, v in group.items() if k not in changing} for group in optimizer.param_groups]


def _text_of(forms: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in forms)

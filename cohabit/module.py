"""`cohabit.load` and `cohabit.plan`: run or plan a module within a memory budget, from Python."""

import logging
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from rich.console import Console
from torch import nn

from cohabit.flat_call import FlatCall
from cohabit.page.html import report_page
from cohabit.planner.compiled import COMPILING, compiles_first
from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import NOISY, Profile
from cohabit.planner.search.driver import search
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import Weights
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize, parse_memory
from cohabit.server.config.sources import config_of
from cohabit.server.deploy.model import Model
from cohabit.server.deploy.notices import random_ops, warn_of_changed_inputs, warn_of_validation
from cohabit.server.deploy.prepare import lowered_and_measured, open_backend, set_up_torch
from cohabit.server.importing.comparison import Different, ReferenceComparison, varied
from cohabit.server.importing.exporting import exported, why_not_exported
from cohabit.server.importing.subject import Subject, Tensors
from cohabit.server.repository.sources import ModelSource
from cohabit.server.view.analysis import PlanAnalysis, analyze
from cohabit.server.view.plan_document import plan_document
from cohabit.server.view.terminal import draw

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""Example inputs of a module: one input, inputs in order, or inputs by name."""
_log = logging.getLogger("cohabit.planner")
SEARCH_S: Final = 2.0
"""Default search time in seconds, as in `cohabit serve`."""
_FRAME_PIXELS = 900


class ModulePlan:
    """A module's plan for a memory size: which parameters stay in memory, and when the others are copied in.

    Notebooks display it as a drawing. `plan`, `graph` and `profile` have the contents of `cohabit plan`'s files.
    """

    def __init__(self, graph: Graph, profile: Profile, plan: Plan) -> None:
        self.graph, self.profile, self.plan = graph, profile, plan
        self._analysis: PlanAnalysis = analyze(graph, profile, plan)

    @property
    def memory_bytes(self) -> int:
        """Memory size of the plan: parameters, activations and scratch of kernels."""
        return self.plan.memory.nbytes

    @property
    def peak(self) -> int:
        """Peak bytes in use."""
        return self._analysis.peak_bytes

    @property
    def latency_s(self) -> float:
        """Predicted seconds of one inference."""
        return self._analysis.timeline.latency_s

    @property
    def resident_s(self) -> float:
        """Predicted seconds with all parameters in memory."""
        return self.profile.compute_s

    @property
    def bound_s(self) -> float:
        """Lower bound on the latency of any plan in this memory, in seconds."""
        assert self.plan.provenance is not None
        return self.plan.provenance.bound_s

    @property
    def gap(self) -> float:
        """Relative distance of the latency to the lower bound: 0.02 is 2 %."""
        return self.latency_s / self.bound_s - 1

    def show(self) -> None:
        """Draw the plan in the terminal."""
        draw(self._analysis, Console(highlight=False))

    def to_html(self) -> str:
        """Return a self-contained HTML page that draws the plan."""
        return report_page(plan_document(self._analysis))

    def _repr_html_(self) -> str:
        frame = f'style="width:100%;height:{_FRAME_PIXELS}px;border:0" sandbox="allow-scripts"'
        return f'<iframe {frame} srcdoc="{escape(self.to_html(), quote=True)}"></iframe>'

    def __repr__(self) -> str:
        mebibytes = self.memory_bytes / (1 << 20)
        return (
            f"<ModulePlan {self.graph.name} in {mebibytes:.1f} MiB: {self.latency_s * 1e3:.3g} ms,"
            f" {self.gap:.1%} over the bound, resident {self.resident_s * 1e3:.3g} ms"
            f"{', provisional: measured beside other work' if self.profile.noise > NOISY else ''}>"
        )


class LoadedModule:
    """A module within a memory budget. Called like the original module, with inputs of the example's shapes.

    Inputs other than tensors are constants: they must have the example's values. Any thread may call it; calls run one
    after another.
    """

    def __init__(self, flat: FlatCall, config: ServeConfig, prepared: "_Prepared") -> None:
        self.plan: ModulePlan = prepared.plan
        self._config, self._flat = config, flat
        self._ports = prepared.model.lowered.inputs
        self._name = prepared.model.source.name
        self._calls = threading.Lock()
        self._is_closed = False
        with ExitStack() as resources:
            with _torch_as_it_was():
                backend = open_backend(config)
            resources.callback(backend.close)
            lowered, memory = prepared.model.lowered, self.plan.plan.memory
            store = backend.open_store(config.store_kind, lowered.weights_path, lowered.manifest)
            resources.callback(store.close)
            workspace_bytes = -(-memory.workspace_bytes // BLOCK_BYTES) * BLOCK_BYTES
            arena = backend.arena(workspace_bytes + memory.partition_bytes)
            resources.callback(arena.close)
            bases = Bases(partition=workspace_bytes, workspace=0)
            self._executor = backend.executor
            self._program = backend.build(lowered, self.plan.plan, self.plan.profile, arena, bases, store)
            self._executor.load(self._program)
            self._resources = resources.pop_all()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the module's outputs. The inputs are not modified.

        Raises TypeError if the inputs' structure differs from the example's, ValueError for another shape, dtype or
        constant, DeviceError if weights cannot be read (a later call may succeed), and RuntimeError after `close`.
        """
        outputs = self.run(self._flat.tensors(inputs, named))
        # Tensors created in inference mode cannot be changed in place outside it.
        return self._flat.unflatten(output.clone() for output in outputs)

    def run(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        """Return the tensors of the outputs in order, for the tensors of a call by name."""
        copies = [tensors[port.name].detach().clone(memory_format=torch.contiguous_format) for port in self._ports]
        with self._calls, _torch_as_it_was():
            if self._is_closed:
                raise RuntimeError(f"the module was closed, and its memory released; load {self._name} again")
            set_up_torch(self._config)
            return self._executor.run(self._program, copies).outputs

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.plan.latency_s * 1e3:.3g} ms planned"
        inputs = ", ".join(f"{p.name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for p in self._ports)
        return f"<LoadedModule {self._name}({inputs}) in {format_bytes(self.plan.memory_bytes)}: {state}>"

    def close(self) -> None:
        """Release the memory, after calls in progress have ended. Later calls raise RuntimeError."""
        with self._calls:
            self._is_closed = True
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(
    module: nn.Module,
    example: Example,
    memory: int | str,
    *,
    store: StoreKind = "ram",
    weights: Weights = "float32",
    searcher: str = "best",
    search_seconds: float = SEARCH_S,
) -> LoadedModule:
    """Return a module that runs within `memory` on the CPU, with torch's current number of threads.

    `memory` is a number of bytes, a size such as "64MiB", or a share of the weights such as "25%". It holds parameters,
    activations and scratch of kernels. `example` has inputs for the module. `store` is where parameters outside
    `memory` are kept: "ram" for a copy in RAM, not counted in the budget, or "file". They are stored and copied in 16
    bits where that is exact, or rounded to `weights`: `bfloat16` or `int8`. The process's C library keeps freed memory
    of the activations' size.

    The result is compared with the module's own on `example`, and on other values of its shapes.

    Raises ValueError for a module in training mode, UnsupportedModel with the reason if the module cannot be exported,
    or if results differ, and InfeasibleBudget, which names the least memory, if it does not fit.
    """
    with tempfile.TemporaryDirectory(prefix="cohabit-") as folder:
        config = _config(Path(folder), memory, store, weights)
        flat = _flat(module, example)
        prepared = _prepared(flat, type(module).__name__, config, searcher, search_seconds)
        loaded = LoadedModule(flat, config, prepared)
        try:
            _require_same_answers(loaded, flat, prepared.model)
        except BaseException:
            loaded.close()
            raise
        return loaded


def plan(
    module: nn.Module,
    example: Example,
    memory: int | str,
    *,
    store: StoreKind = "ram",
    weights: Weights = "float32",
    searcher: str = "best",
    search_seconds: float = SEARCH_S,
) -> ModulePlan:
    """Plan a module for `memory` without loading it. See `load` for the arguments and errors."""
    with tempfile.TemporaryDirectory(prefix="cohabit-") as folder:
        config = _config(Path(folder), memory, store, weights)
        name = type(module).__name__
        return _prepared(_flat(module, example), name, config, searcher, search_seconds).plan


@dataclass(frozen=True, slots=True)
class _Prepared:
    model: Model
    plan: ModulePlan


def _config(folder: Path, memory: int | str, store: StoreKind, weights: Weights) -> ServeConfig:
    """Return settings of `cohabit serve`, with this process's number of threads and a temporary cache."""
    size = FixedSize(memory) if isinstance(memory, int) else parse_memory(memory)
    settings = {"cache": str(folder / "cache"), "store": store, "weights": weights}
    config = config_of({"repository": str(folder), "memory": "1B", **settings})
    return replace(config, memory=size, threads=torch.get_num_threads(), batch_sizes=(1,))


def _flat(module: nn.Module, example: Example) -> FlatCall:
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode; call .eval() first")
    if torch.is_autocast_enabled("cpu"):
        raise ValueError(
            f"{type(module).__name__} is loaded inside torch.autocast, which torch.export does not record; load it"
            " outside, and let its forward enter torch.autocast, or convert it with .to(torch.bfloat16)"
        )
    if isinstance(example, torch.Tensor):
        return FlatCall(module, (example,), {})
    if isinstance(example, Mapping):
        return FlatCall(module, (), example)
    return FlatCall(module, tuple(example), {})


def _prepared(flat: FlatCall, name: str, config: ServeConfig, searcher: str, search_seconds: float) -> _Prepared:
    """Export, lower, profile and plan a module, as `cohabit plan` does."""
    archive = config.repository / f"{name}.pt2"
    with Console(stderr=True).status(f"{name}: exporting") as status, _torch_as_it_was():
        try:
            with _padding_as_in_eager(flat.module):
                torch.export.save(exported(flat.module, flat.example), archive)
        except Exception as error:  # torch's exporter raises any type
            reason = why_not_exported(error, "Change the module, or load the part of it that can be exported")
            raise UnsupportedModel(f"{name} cannot be exported: {reason}") from error
        model = lowered_and_measured(
            ModelSource(name, 1, archive), config, lambda _, stage: status.update(f"{name}: {stage}")
        )
        warn_of_validation(model.lowered)
        warn_of_changed_inputs(model.lowered)
        graphs, profiles = model.lowered.graphs, model.profiles
        memory = split_budget(graphs, profiles, config.memory.of(model.weight_bytes))
        if (noise := model.noise) > NOISY:
            _log.warning(
                "the plan's times are provisional: other work disturbed their measurement; plan again when the machine"
                " is quiet",
                extra={"fields": {"module": name, "noise": round(noise, 2)}},
            )
        status.update(f"{name}: planning")
        if compiles_first():
            _log.warning(COMPILING)
        bucket = min(graphs)
        problem = Problem(graphs[bucket], profiles[bucket], memory)
        found = search(problem, searcher, limit=Limit(seconds=search_seconds))
    return _Prepared(model, ModulePlan(graphs[bucket], profiles[bucket], found))


def _require_same_answers(loaded: LoadedModule, flat: FlatCall, model: Model) -> None:
    """Compare a module with eager PyTorch, on the example and other values of its shapes. Raises UnsupportedModel."""
    if random_ops(model.lowered) or model.lowered.encoding is not None:
        return  # nothing to compare; encoded weights were compared with exact ones
    subject = Subject(flat.module, (), lambda rows, seed: flat.example)
    names = [flat.output_name(index) for index in range(len(model.lowered.outputs))]
    comparison = ReferenceComparison(subject, loaded.run, names)
    with _torch_as_it_was():
        try:
            comparison.largest_error(flat.example, "for the example")
            with suppress(RuntimeError, ValueError, IndexError):  # the module may refuse these values
                comparison.largest_error(varied(flat.example), "for random values of the example's shapes")
        except Different as different:
            raise UnsupportedModel(
                f"{model.source.name}: {different}; what torch.export records is not what the module does. Load"
                " the part of it that can be exported"
            ) from different


@contextmanager
def _padding_as_in_eager(module: nn.Module) -> Iterator[None]:
    """Export the outputs of padded positions that eager PyTorch's encoders return.

    If padding comes last in each row, eager PyTorch computes an nn.TransformerEncoder without its padded positions, and
    fills them with zeros after the last layer. torch.export leaves that path out.
    """
    handles = [
        encoder.layers[-1].register_forward_hook(_zero_padding, with_kwargs=True)
        for encoder in module.modules()
        if isinstance(encoder, nn.TransformerEncoder)
        if encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zero_padding(layer: nn.Module, args: Any, kwargs: Mapping[str, Any], output: torch.Tensor) -> torch.Tensor:
    """Hook of an encoder's last layer, whose padding mask is not zero where a position is padded."""
    mask = kwargs.get("src_key_padding_mask")
    if mask is None or kwargs.get("src_mask") is not None or output.dim() != 3:
        return output
    padded = mask != 0
    comes_last = (padded[:, 1:] | ~padded[:, :-1]).all()
    return output.masked_fill((padded & comes_last)[..., None], 0.0)


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Restore torch's global settings after the block: a device changes them, and the caller may rely on them.

    Inside, autocast is off: programs have the types of the export.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]

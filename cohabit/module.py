"""`cohabit.load` and `cohabit.plan`: run or plan a module within a memory budget, from Python."""

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from rich.console import Console
from torch import nn
from torch.utils import _pytree as pytree

from cohabit.page.html import report_page
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
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
from cohabit.server.deploy.notices import warn_of_changed_inputs, warn_of_validation
from cohabit.server.deploy.prepare import lowered_and_measured, open_backend, set_up_torch
from cohabit.server.repository.sources import ModelSource
from cohabit.server.view.analysis import PlanAnalysis, analyze
from cohabit.server.view.plan_document import plan_document
from cohabit.server.view.terminal import draw

Example = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
"""Example inputs of a module: one input, inputs in order, or inputs by name."""
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
            f" {self.gap:.1%} over the bound, resident {self.resident_s * 1e3:.3g} ms>"
        )


class LoadedModule:
    """A module within a memory budget. Called like the original module, with inputs of the example's shapes.

    Any thread may call it; calls run one after another.
    """

    def __init__(self, exported: torch.export.ExportedProgram, config: ServeConfig, prepared: "_Prepared") -> None:
        self.plan: ModulePlan = prepared.plan
        self._config, self._spec = config, exported.call_spec
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

    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Return the module's outputs. The inputs are not modified.

        Raises TypeError if the inputs' number or names differ from the example's, ValueError for another shape or
        dtype, DeviceError if weights cannot be read (a later call may succeed), and RuntimeError after `close`.
        """
        flat = self._flat(inputs, named)
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in flat]
        with self._calls, _torch_as_it_was():
            if self._is_closed:
                raise RuntimeError(f"the module was closed, and its memory released; load {self._name} again")
            set_up_torch(self._config)
            outputs = self._executor.run(self._program, copies).outputs
        # Tensors created in inference mode cannot be changed in place outside it.
        return pytree.tree_unflatten([output.clone() for output in outputs], self._spec.out_spec)

    def _flat(self, inputs: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        flat, spec = pytree.tree_flatten((inputs, dict(sorted(named.items()))))
        if spec != self._spec.in_spec:
            in_order, by_name = pytree.tree_unflatten(range(len(self._ports)), self._spec.in_spec)
            raise TypeError(
                f"called with {len(inputs)} inputs in order and {sorted(named)} by name; the example had"
                f" {len(in_order)} in order and {sorted(by_name)} by name"
            )
        for tensor, port in zip(flat, self._ports, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (port.shape, port.dtype):
                raise ValueError(
                    f"{port.name} is {tensor.dtype} {list(tensor.shape)};"
                    f" the example was {port.dtype} {list(port.shape)}"
                )
        return flat

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

    Raises ValueError for a module in training mode, UnsupportedModel with torch's reason if the module cannot be
    exported, and InfeasibleBudget, which names the least memory, if it does not fit.
    """
    with tempfile.TemporaryDirectory(prefix="cohabit-") as folder:
        exported = _exported(module, example)
        config = _config(Path(folder), memory, store, weights)
        prepared = _prepared(exported, type(module).__name__, config, searcher, search_seconds)
        return LoadedModule(exported, config, prepared)


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
        return _prepared(_exported(module, example), name, config, searcher, search_seconds).plan


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


def _exported(module: nn.Module, example: Example) -> torch.export.ExportedProgram:
    if module.training:
        raise ValueError(f"{type(module).__name__} is in training mode; call .eval() first")
    inputs: tuple[torch.Tensor, ...] = ()
    named: dict[str, torch.Tensor] = {}
    if isinstance(example, torch.Tensor):
        inputs = (example,)
    elif isinstance(example, Mapping):
        named = dict(sorted(example.items()))
    else:
        inputs = tuple(example)
    try:
        with torch.no_grad():
            return torch.export.export(module, inputs, named)
    except Exception as error:
        raise UnsupportedModel(f"{type(module).__name__} cannot be exported: {error}") from error


def _prepared(
    exported: torch.export.ExportedProgram, name: str, config: ServeConfig, searcher: str, search_seconds: float
) -> _Prepared:
    """Lower, profile and plan a module, as `cohabit plan` does."""
    archive = config.repository / f"{name}.pt2"
    torch.export.save(exported, archive)
    with Console(stderr=True).status(f"{name}: preparing") as status, _torch_as_it_was():
        model = lowered_and_measured(
            ModelSource(name, 1, archive), config, lambda _, stage: status.update(f"{name}: {stage}")
        )
        warn_of_validation(model.lowered)
        warn_of_changed_inputs(model.lowered)
        graphs, profiles = model.lowered.graphs, model.profiles
        memory = split_budget(graphs, profiles, config.memory.of(model.weight_bytes))
        status.update(f"{name}: planning")
        bucket = min(graphs)
        problem = Problem(graphs[bucket], profiles[bucket], memory)
        found = search(problem, searcher, limit=Limit(seconds=search_seconds))
    return _Prepared(model, ModulePlan(graphs[bucket], profiles[bucket], found))


@contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Restore torch's global settings after the block: a device changes them, and the caller may rely on them."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch._C._set_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]

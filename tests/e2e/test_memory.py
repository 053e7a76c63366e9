"""Memory is a hard cap: parameters in use, activations and the whole process stay within what was promised."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import cohabit.runtime.cpu.backend
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.plan import Compute, Drop, Plan, SwapIn
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Program
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.slots import Frame
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import parse_memory
from cohabit.server.deploy.lifecycle import open_placement
from cohabit.server.deploy.model import Model
from cohabit.server.deploy.place import ModelPlacement
from cohabit.server.engine.compute_lane import ComputeLane, make_lanes
from cohabit.server.engine.servable import ProgramServable
from cohabit.server.ipc.model import ModelKey
from cohabit.server.repository.scan import scan
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import QUICK_SEARCH, infer, metric, process
from tests.support.planner.reference import live_bytes, peak_bytes
from tests.support.runtime.observing import addresses, observed
from tests.support.runtime.stores import LateStore

NON_PARAMETERS = ("input", "activation")


@dataclass
class Deployed:
    """What was made of a repository."""

    placement: ModelPlacement

    @property
    def arena(self) -> CpuArena:
        assert isinstance(self.placement.memory.arena, CpuArena)
        return self.placement.memory.arena

    @property
    def workspace_bytes(self) -> int:
        return self.placement.memory.partitions.workspace_bytes

    def model(self, name: str) -> Model:
        return self.placement.models[ModelKey(name, 1)]

    def partition(self, name: str) -> range:
        """Offsets of a model's partition in the arena."""
        extent = self.placement.memory.extent_of(self.model(name))
        return range(extent.offset, extent.end)

    @property
    def workspace(self) -> range:
        return range(self.workspace_bytes)

    def run(self, name: str, bucket: Bucket, observe: Any = None) -> list[torch.Tensor]:
        servable = self.model(name).servable
        inputs = self.model(name).lowered.examples(bucket)
        program = servable.programs[bucket]
        return servable.executor.run(program if observe is None else observed(program, observe), inputs).outputs


@contextmanager
def deployed(repository: Path, memory: str, cache: Path, **changes: Any) -> Iterator[Deployed]:
    """Load a repository as the server does, and look into what was made of it."""
    changes = {"batch_sizes": (1, 4), "engine": "in-process", "search": QUICK_SEARCH} | changes
    config = ServeConfig(repository, parse_memory(memory), cache=cache, **changes)
    with asyncio.Runner() as runner:
        placement, lanes = runner.run(_loaded(repository, config))
        try:
            yield Deployed(placement)
        finally:
            stopped = [runner.run(lane.stop()) for lane in lanes]
            assert all(stopped)
            placement.close()


async def _loaded(repository: Path, config: ServeConfig) -> tuple[ModelPlacement, list[ComputeLane]]:
    lanes, sources = make_lanes(config.compute_lanes, config.queue_limit), scan(repository)
    for lane in lanes:
        lane.start()
    placement, _ = open_placement(sources, config, lanes)
    try:
        models, failures = await placement.prepare(sources)
        assert not failures | await placement.place(models)
    except BaseException:
        await asyncio.gather(*(lane.stop() for lane in lanes))
        placement.close()
        raise
    return placement, lanes


@dataclass(frozen=True)
class Use:
    """Bytes of the arena that an operator was given, and what they were."""

    step: int
    offset: int
    content: bytes


class Watch(TorchDispatchMode):
    """Notes every tensor in the arena that reaches an operator, at the operator and not where plans are bound."""

    def __init__(self, arena: CpuArena) -> None:
        super().__init__()
        self.arena = addresses(arena)
        self.step = -1
        self.uses: list[Use] = []

    def observe(self, step: int, frame: Frame) -> None:
        self.step = step

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor) and (address := _address(leaf)) in self.arena:
                self.uses.append(Use(self.step, address - self.arena.start, _extent(leaf)))
        return function(*args, **(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    return packing.storage_key(tensor) if packing.is_packed(tensor) else tensor.data_ptr()


def _extent(tensor: torch.Tensor) -> bytes:
    """The bytes from a tensor's first to its last element, whatever its strides; all bytes of a packed weight."""
    if packing.is_packed(tensor):
        return packing.raw_bytes(tensor).tobytes()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    with torch.utils._python_dispatch._disable_current_modes():
        flat = tensor.as_strided((elements,), (1,))
        return flat.numpy().tobytes()


def within(use: Use, region: range) -> bool:
    return region.start <= use.offset and use.offset + len(use.content) <= region.stop


def test_parameters_in_use_lie_in_the_models_own_partition_or_the_workspace(
    archives: Archives,
) -> None:
    names = ("bert_small", "ranker")
    with deployed(archives.repository(*names), "25%", archives.cache) as device:
        assert device.arena.nbytes <= device.placement.decider.memory_bytes
        plans = [plan for name in names for plan in device.model(name).plans.values()]
        assert {plan.provenance.searcher for plan in plans if plan.provenance is not None} == {QUICK_SEARCH}
        used: dict[str, Counter[str]] = {name: Counter() for name in names}
        for name, bucket in [(n, b) for _ in range(3) for b in (Bucket(1), Bucket(4)) for n in names]:
            with Watch(device.arena) as watch:
                device.run(name, bucket, watch.observe)
            (other,) = set(names) - {name}
            for use in watch.uses:
                assert within(use, device.partition(name)) or within(use, device.workspace), use.step
                assert not within(use, device.partition(other))
                used[name]["partition" if within(use, device.partition(name)) else "workspace"] += 1
            _assert_these_are_the_parameters(device, name, bucket, watch.uses)
        assert used["bert_small"]["partition"] > 0
        assert sum(counts["workspace"] for counts in used.values()) > 0


def _assert_these_are_the_parameters(device: Deployed, name: str, bucket: Bucket, uses: Sequence[Use]) -> None:
    """Every step used exactly the parameters that its op reads, each complete: the bytes are the weights file's."""
    lowered, plan = device.model(name).lowered, device.model(name).plans[bucket]
    graph, segments = lowered.graphs[bucket], lowered.manifest.segments
    weights = np.memmap(lowered.weights_path, np.uint8, "r")
    by_step: dict[int, list[Use]] = {}
    for use in uses:
        by_step.setdefault(use.step, []).append(use)
    for index, places in _parameters_in_memory(device, name, plan):
        step = plan.steps[index]
        assert isinstance(step, Compute)
        read = set()
        for use in by_step.pop(index, []):
            (segment,) = (s for s, at in places.items() if at <= use.offset < at + max(segments[s].nbytes, 1))
            start = segments[segment].offset + use.offset - places[segment]
            assert use.content == weights[start : start + len(use.content)].tobytes()
            read.add(segment)
        assert read == {i for i in graph.ops[step.op].reads if graph.tensors[i].kind == "parameter"}
    assert not by_step


def _parameters_in_memory(device: Deployed, name: str, plan: Plan) -> Iterator[tuple[int, dict[int, int]]]:
    """Each compute step's index, and where in the arena the plan has parameters then."""
    starts = {"partition": device.partition(name).start, "workspace": device.workspace.start}
    places = {p.tensor: starts[p.address.region] + p.address.offset for p in plan.residents}
    for index, step in enumerate(plan.steps):
        match step:
            case SwapIn(tensor, address):
                places[tensor] = starts[address.region] + address.offset
            case Drop(tensor):
                places.pop(tensor, None)
            case Compute():
                yield index, places


@dataclass
class FrameWatch:
    """Sums up the storages outside of the arena that a frame holds before each step."""

    arena: range
    held: dict[int, int] = field(default_factory=dict)
    """Bytes by the plan's step."""

    def observe(self, step: int, frame: Frame) -> None:
        storages = {
            leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
            for leaf in pytree.tree_leaves(frame)
            if isinstance(leaf, torch.Tensor) and leaf.data_ptr() not in self.arena
        }
        self.held[step] = sum(storages.values())


@pytest.fixture(
    scope="module",
    params=[("bert_small", "25%"), ("ranker", "25%"), ("torchcrepe", "least")],
    ids=" in ".join,
)
def alone(request: pytest.FixtureRequest, archives: Archives) -> Iterator[tuple[str, Deployed]]:
    """A model in so much memory, or in the least that will do where 25 % will not."""
    name, memory = request.param
    repository, search = archives.repository(name), QUICK_SEARCH
    if memory == "least":
        with pytest.raises(InfeasibleBudget) as caught, deployed(repository, "25%", archives.cache):
            pass
        memory, search = f"{caught.value.least_bytes}B", "best"
    with deployed(repository, memory, archives.cache, search=search) as device:
        yield name, device


def test_no_step_of_a_plan_needs_more_than_partition_and_workspace(alone: tuple[str, Deployed]) -> None:
    name, device = alone
    partition_bytes = len(device.partition(name))
    for bucket, plan in device.model(name).plans.items():
        graph = device.model(name).lowered.graphs[bucket]
        most = max(*live_bytes(graph, plan), peak_bytes(graph, plan))
        assert most <= partition_bytes + device.workspace_bytes
        assert partition_bytes == plan.memory.partition_bytes
        assert device.workspace_bytes == plan.memory.workspace_bytes


@pytest.mark.parametrize("chosen", [min, max])
def test_activations_that_are_held_are_those_that_the_plan_counts(
    alone: tuple[str, Deployed], chosen: Callable[[Iterable[Bucket]], Bucket]
) -> None:
    name, device = alone
    bucket = chosen(device.model(name).plans)
    watch = FrameWatch(addresses(device.arena))
    device.run(name, bucket, watch.observe)
    plan, graph = device.model(name).plans[bucket], device.model(name).lowered.graphs[bucket]
    counted = [
        sum(graph.tensors[i].nbytes for i in graph.inputs),
        *live_bytes(graph, plan, NON_PARAMETERS, aligned=False),
    ]
    assert watch.held == {step: counted[step] for step, s in enumerate(plan.steps) if isinstance(s, Compute)}


def allocated_peak_bytes(program: Program, inputs: Sequence[torch.Tensor], servable: ProgramServable) -> int:
    """The most that torch's allocator gave out at once in one inference, as torch's profiler counts it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        servable.executor.run(program, list(inputs))
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize("chosen", [min, max])
def test_torch_allocates_no_more_for_an_inference_than_the_plan_counts(
    alone: tuple[str, Deployed], chosen: Callable[[Iterable[Bucket]], Bucket]
) -> None:
    name, device = alone
    bucket = chosen(device.model(name).plans)
    servable = device.model(name).servable
    device.run(name, bucket)
    allocated = allocated_peak_bytes(
        servable.programs[bucket], device.model(name).lowered.examples(bucket), servable
    )
    plan, graph = device.model(name).plans[bucket], device.model(name).lowered.graphs[bucket]
    assert allocated <= peak_bytes(graph, plan, NON_PARAMETERS)


@pytest.mark.parametrize("share", [30, 75])
def test_no_op_reads_what_has_not_arrived_however_late_copies_are(
    archives: Archives, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """Runs follow each other at once, so that each starts while residents of the one before are still on their way."""
    repository = archives.repository("ranker", "torchcrepe")
    one, four = Bucket(1), Bucket(4)
    runs = [("ranker", one), ("ranker", one), ("torchcrepe", four), ("ranker", four), *[("torchcrepe", one)] * 2]
    with deployed(repository, f"{share}%", archives.cache) as device:
        expected = [device.run(*run) for run in runs]
    with monkeypatch.context() as patch:
        patch.setattr(
            cohabit.runtime.cpu.backend,
            "open_store",
            lambda kind, *args, unmap_tables, **flags: LateStore(*args, **flags),
        )
        with deployed(repository, f"{share}%", archives.cache) as device:
            for run, (answer,) in [*zip(runs, expected, strict=True)] * 3:
                assert torch.equal(device.run(*run)[0], answer), run


@pytest.mark.slow
def test_streaming_from_a_file_saves_the_memory_of_what_is_not_resident(archives: Archives) -> None:
    """ResNet-152 as a process: the second start, when nothing is lowered or measured any more, is compared."""
    repository, inputs = archives.repository("resnet152"), archives.inputs("resnet152", 1)
    peaks, answers = {}, {}
    for layout, memory in (("partitioned", "25%"), ("resident", "200%")):
        flags = ("--store", "file", "--layout", layout, "--batch-sizes", "1")
        for _start in ("first", "second"):
            with process(repository, memory, archives.cache, *flags) as server:
                server.until_ready()
                for _ in range(10):
                    (answers[layout],) = infer(server.address, "resnet152", inputs).values()
                peaks[layout] = server.peak_bytes()
                resident = metric(server.metrics_address, "cohabit_resident_bytes", "resnet152")
                if layout == "partitioned":
                    parameters = metric(server.metrics_address, "cohabit_parameter_bytes", "resnet152")
                    not_resident = parameters - resident
    print(f"peaks: {peaks}, parameters that are not resident: {not_resident:.0f} bytes")
    assert not_resident > 100 << 20
    assert peaks["resident"] - peaks["partitioned"] >= 0.6 * not_resident
    np.testing.assert_array_equal(answers["partitioned"], answers["resident"])

"""What only a GPU can show: the driver's assumptions about CUDA, flat memory, and faults that lose the device."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Problem
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.stores.pages import anonymous_memory
from tests.support.runtime import models
from tests.support.runtime.backends import has_gpu, real_cuda
from tests.support.runtime.plans import streaming_plan, with_room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]

MIB = 1 << 20
INFERENCES = 10_000


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    opened = real_cuda()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("convolutions")
    torch.manual_seed(0)
    models.export(models.ConvNorm(), {"x": torch.zeros(3, 3, 64, 64)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "conv_norm", [1, 8], folder / "cache")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    models.export(models.Wide(12, 1024), {"x": torch.zeros(3, 1024)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "wide", [1, 8], folder / "cache")


def host_bytes(backend: CudaBackend, nbytes: int) -> np.ndarray:
    return backend.pinned_memory.take(nbytes, "a test")


def test_a_copy_from_registered_memory_does_not_block(backend: CudaBackend) -> None:
    driver, host = backend.driver, host_bytes(backend, 256 * MIB)
    device = driver.allocate(256 * MIB)
    end = driver.event()
    with driver.on(backend.streams.swap_in):  # the first copy of a stream makes its queue
        driver.copy(device[:4096], torch.from_numpy(host)[:4096])
    driver.drain()
    start_s = time.perf_counter()
    with driver.on(backend.streams.swap_in):
        driver.copy(device, torch.from_numpy(host))
        driver.record(end)
    issued_s = time.perf_counter() - start_s
    driver.synchronize(end)
    ended_s = time.perf_counter() - start_s
    assert issued_s < ended_s / 2
    backend.pinned_memory.release(host)


def test_kernels_read_mapped_memory_in_place(backend: CudaBackend) -> None:
    host = torch.from_numpy(host_bytes(backend, 4 * MIB)).view(torch.float32)
    host.copy_(torch.arange(MIB, dtype=torch.float32))
    table = backend.driver.mapped(host.reshape(-1, 16))
    rows = torch.embedding(table, torch.tensor([3, 65535], device="cuda")).cpu()
    assert torch.equal(rows, host.reshape(-1, 16)[[3, 65535]])


def test_tensors_of_a_pool_lie_in_its_bytes_and_nowhere_else(backend: CudaBackend) -> None:
    driver = backend.driver
    memory = driver.allocate(64 * MIB)
    low, high = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    with driver.on(backend.streams.compute):
        pool = driver.pool(memory, 56 * MIB)
        with driver.allocating(pool):
            made = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (100, 3 * MIB, 20 * MIB, 2 << 10)]
            assert all(low <= t.data_ptr() and t.data_ptr() + t.nbytes <= high for t in made)
            assert pool.held_bytes >= 23 * MIB
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.refused_bytes is not None
    made.clear()
    assert pool.held_bytes == 0
    pool.close()


def test_measured_plans_have_the_resident_program_s_bits_at_every_budget(
    backend: CudaBackend, convolutions: Lowered, wide: Lowered
) -> None:
    for lowered in (convolutions, wide):
        store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
        sized, profiles = backend.measure(lowered, store, None, lambda text: None)
        for batch in sized.buckets:
            graph, inputs = sized.graphs[batch], sized.examples(batch)
            whole = resident_plan(graph)
            largest = max((graph.tensors[i].nbytes for i in graph.parameters), default=0)
            room = peak_activation_bytes(graph) + 4 * MIB
            arena = backend.arena(whole.memory.nbytes + room + 4 * largest)

            def run(plan, profile=None):  # type: ignore[no-untyped-def]
                program = backend.build(sized, plan, profile, arena, Bases(0, plan.memory.partition_bytes), store)  # noqa: B023
                backend.executor.load(program)
                results = [backend.executor.run(program, inputs).outputs[0] for _ in range(4)]  # noqa: B023
                assert program.admission.graph is not None, program.admission.refused
                assert all(torch.equal(results[0], r) for r in results)
                backend.executor.release(program)
                return results[0]

            expected = run(with_room(whole, room))
            for share in (0.0, 0.3, 0.7):
                partition = int(graph.parameter_bytes * share) // 4096 * 4096
                workspace = -(-(room + 2 * largest) // 4096) * 4096
                plan = search(Problem(graph, profiles[batch], Memory(workspace, partition)))
                assert torch.equal(run(plan, profiles[batch]), expected), f"{lowered.name} b{batch} {share:.0%}"
            arena.close()
        store.close()


def test_ten_thousand_inferences_allocate_nothing(backend: CudaBackend, wide: Lowered) -> None:
    store = backend.open_store("ram", wide.weights_path, wide.manifest)
    arena = backend.arena(256 * MIB)
    programs = []
    offset = 0
    for batch in wide.buckets:
        plan = streaming_plan(wide.graphs[batch], frozenset({0, 1, 2}))
        roomy = with_room(plan, 32 * MIB)
        program = backend.build(wide, roomy, None, arena, Bases(offset, 128 * MIB), store)
        backend.executor.load(program)
        programs.append((program, wide.examples(batch)))
        offset += plan.memory.partition_bytes
    for program, inputs in programs:
        backend.executor.run(program, inputs)
    before, statistics = backend.driver.memory(), torch.cuda.memory_stats()
    for _ in range(INFERENCES // len(programs)):
        for program, inputs in programs:
            backend.executor.run(program, inputs)
    after, later = backend.driver.memory(), torch.cuda.memory_stats()
    assert after.process_bytes == before.process_bytes, "other processes change the device's free bytes"
    for name in ("num_device_alloc", "num_alloc_retries", "allocation.all.allocated"):
        assert later.get(name) == statistics.get(name), name


def test_a_replay_and_streams_give_the_same_bits(backend: CudaBackend, convolutions: Lowered) -> None:
    store = backend.open_store("ram", convolutions.weights_path, convolutions.manifest)
    plan = streaming_plan(convolutions.graphs[Bucket(8)])
    roomy = with_room(plan, 256 * MIB)
    arena = backend.arena(512 * MIB)
    program = backend.build(convolutions, roomy, None, arena, Bases(0, 0), store)
    backend.executor.load(program)
    inputs = convolutions.examples(Bucket(8))
    replayed = backend.executor.run(program, inputs).outputs[0]
    assert torch.equal(backend.executor.run(program, inputs, traced=True).outputs[0], replayed)


LOSING = """
import sys, torch
from pathlib import Path
from cohabit.planner.shapes import Bucket
from cohabit.runtime.errors import DeviceError, DeviceLost
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.binding.program import Bases
from tests.support.runtime import models
from tests.support.runtime.backends import real_cuda
from tests.support.runtime.plans import with_room

class Computed(torch.nn.Module):
    # Only the kernel that reads by an index that the program computes can tell that it is out of range.
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(48, 16))

    def forward(self, tokens):
        return self.table[tokens * (1 << 40)]

folder = Path(sys.argv[1])
torch.manual_seed(0)
models.export(Computed(), {"tokens": torch.zeros(3, 5, dtype=torch.int64)}, folder / "model.pt2")
lowered = lower(folder / "model.pt2", "computed", [2], folder / "cache")
backend = real_cuda()
store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
plan = resident_plan(lowered.graphs[Bucket(2)])
plan = with_room(plan, 64 << 20)
program = backend.build(lowered, plan, None, backend.arena(256 << 20), Bases(0, plan.memory.partition_bytes), store)
backend.executor.load(program)
for _ in range(2):
    try:
        backend.executor.run(program, [torch.ones((2, 5), dtype=torch.int64)])
        raise SystemExit("an index outside of the table was read")
    except DeviceLost:
        assert backend.executor.lost
print("lost, and said so", flush=True)
import os
os._exit(0)
"""


def test_an_input_s_index_out_of_range_is_refused_and_the_device_goes_on(
    backend: CudaBackend, tmp_path: Path
) -> None:
    """Kernels lose the device, or compare an index's lower 32 bits: 1 << 40 is then the first row."""
    torch.manual_seed(0)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    tied = models.lowered(models.Tied(), {"tokens": tokens}, tmp_path, "tied", [2])
    store = backend.open_store("ram", tied.weights_path, tied.manifest)
    plan = with_room(resident_plan(tied.graphs[Bucket(2)]), 64 * MIB)
    arena = backend.arena(256 * MIB)
    program = backend.build(tied, plan, None, arena, Bases(0, plan.memory.partition_bytes), store)
    backend.executor.load(program)
    expected = backend.executor.run(program, [tokens]).outputs
    for index in (-1, 9000, 1 << 40):
        with pytest.raises(DeviceError, match=f"input tokens has the value {index}, an index that is out of range"):
            backend.executor.run(program, [torch.full_like(tokens, index)])
    assert all(map(torch.equal, backend.executor.run(program, [tokens]).outputs, expected))
    assert backend.executor.lost is None


def test_a_fault_of_the_device_is_an_error_and_a_state_and_never_a_hang(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOSING, str(tmp_path)], capture_output=True, text=True, timeout=180, check=False
    )
    assert "lost, and said so" in done.stdout, done.stderr[-2000:]


def test_pinned_memory_is_anonymous_memory_of_exactly_that_size(backend: CudaBackend) -> None:
    before = backend.pinned_memory.used_bytes
    host = host_bytes(backend, 3 * MIB + 17)
    assert backend.pinned_memory.used_bytes - before == 3 * MIB + 17
    assert torch.from_numpy(host).is_pinned()
    backend.pinned_memory.release(host)
    assert not torch.from_numpy(np.frombuffer(anonymous_memory(4096), np.uint8)).is_pinned()


def test_a_graph_launched_during_another_one_has_its_own_bits(backend: CudaBackend, wide: Lowered) -> None:
    """Two loads of a model, each in its own partition, in turn and one ahead of the other."""
    graph = wide.graphs[Bucket(1)]
    plan = with_room(streaming_plan(graph, frozenset(graph.parameters[:2])), 32 * MIB)
    each = -(-plan.memory.partition_bytes // 4096) * 4096
    store = backend.open_store("ram", wide.weights_path, wide.manifest)
    arena = backend.arena(plan.memory.workspace_bytes + 2 * each)
    programs = []
    for number in range(2):
        bases = Bases(plan.memory.workspace_bytes + number * each, 0)
        programs.append(backend.build(replace(wide, name=f"wide{number}"), plan, None, arena, bases, store))
        backend.executor.load(programs[-1])
    inputs = [[x + n for x in wide.examples(Bucket(1))] for n in range(6)]
    expected = [backend.executor.run(programs[n % 2], given).outputs[0] for n, given in enumerate(inputs)]
    waiting: list[Any] = []
    found = []
    for n, given in enumerate(inputs):
        assert not waiting or backend.executor.launches_ahead(programs[n % 2])
        waiting.append(backend.executor.begin(programs[n % 2], [x.clone() for x in given]))
        if len(waiting) > 1:
            found.append(waiting.pop(0)().outputs[0])
    found.append(waiting.pop(0)().outputs[0])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    for program in programs:
        backend.executor.release(program)
    arena.close()
    store.close()

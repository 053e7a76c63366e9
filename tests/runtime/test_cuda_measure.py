"""What is measured on a device becomes the model's scratch and profile, and is kept."""

from pathlib import Path

import pytest
import torch

from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling import link, measure
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.profiling.profile import resident_plan
from tests.runtime import models
from tests.runtime.cuda_fake import FakeDriver

MIB = 1 << 20


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("measured")
    torch.manual_seed(0)
    models.export(models.Wide(4, 264), {"x": torch.zeros(3, 264)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "wide", [1, 2], folder / "cache")


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_AMPLE_BYTES", 16 * MIB)
    monkeypatch.setattr(link, "_COPY_BYTES", 64 << 10)
    monkeypatch.setattr(measure, "_ROUNDS", 1)


def measured(
    backend: CudaBackend, lowered: Lowered, cache: Path | None = None
) -> tuple[Lowered, dict[int, object]]:
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    return backend.measure(lowered, store, cache, lambda text: None)


def test_a_profile_has_every_batch_and_positive_figures(lowered: Lowered) -> None:
    driver = FakeDriver()
    sized, profiles = measured(CudaBackend(driver), lowered)
    assert sorted(profiles) == [Bucket(1), Bucket(2)]
    assert driver.allocated_bytes == driver.open_pools == 0, "what was measured with is released"
    for batch, profile in profiles.items():
        assert profile.graph == sized.graphs[batch].fingerprint
        assert len(profile.op_seconds) == len(sized.graphs[batch].ops)
        assert min(profile.op_seconds) > 0
        assert min(profile.swap_in.bandwidth_bytes_per_s, profile.swap_out.bandwidth_bytes_per_s) > 0
        assert profile.compute_slowdown >= 1 <= profile.swap_slowdown


def test_scratch_is_what_kernels_take_beyond_their_results_and_what_pools_waste(lowered: Lowered) -> None:
    driver = FakeDriver()
    driver.kernel_bytes = 3 * MIB
    driver.least_pool_bytes = 9 * MIB
    graph = lowered.graphs[Bucket(1)]
    sized = measured(CudaBackend(driver), lowered)[0].graphs[Bucket(1)]
    for before, after in zip(graph.ops, sized.ops, strict=True):
        assert after.scratch_bytes >= 3 * MIB - sum(graph.tensors[i].nbytes for i in before.writes)
    # The fake's allocator wants 9 MiB. Scratch of 3 MiB needs the large part of a pool, of 10 MiB or more, beside a
    # segment for small tensors; and there is one segment to spare.
    assert 14 * MIB <= peak_activation_bytes(sized) <= 14 * MIB + 4096


def test_a_plan_that_gets_no_memory_is_replaced_while_a_model_is_measured(
    lowered: Lowered, caplog: pytest.LogCaptureFixture
) -> None:
    """cuDNN tries its plans in order, and the first may want more than the device has."""
    driver = FakeDriver()
    driver.plan_bytes = (64 << 30, 3 * MIB)
    graph = lowered.graphs[Bucket(1)]
    sized = measured(CudaBackend(driver), lowered)[0].graphs[Bucket(1)]
    for before, after in zip(graph.ops, sized.ops, strict=True):
        assert after.scratch_bytes >= 3 * MIB - sum(graph.tensors[i].nbytes for i in before.writes)
    refusals = [r.fields for r in caplog.records if "made do" in r.getMessage()]  # type: ignore[attr-defined]
    assert [(f["batch"], f["refused_bytes"]) for f in refusals] == [("1", 64 << 30), ("2", 64 << 30)]


@pytest.mark.parametrize("free_bytes", [1 << 30, 80 << 30])
def test_a_model_is_measured_with_half_of_what_is_free_and_no_more_than_16_gib(
    lowered: Lowered, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the little room of the other tests
    graph = lowered.graphs[Bucket(2)]
    plan = measure._ample_plan(graph, free_bytes)
    whole = resident_plan(graph)
    spare = free_bytes - whole.memory.nbytes
    assert plan.pool_bytes - whole.pool_bytes == pytest.approx(min(spare // 2, 16 << 30), abs=1 << 20)
    assert plan.memory.nbytes <= free_bytes


def test_a_measurement_is_kept_and_belongs_to_its_device(lowered: Lowered, tmp_path: Path) -> None:
    first = measured(CudaBackend(FakeDriver()), lowered, tmp_path)
    driver = FakeDriver()
    again = measured(CudaBackend(driver), lowered, tmp_path)
    assert (again[0].graphs, again[1]) == (first[0].graphs, first[1])
    assert "launch" not in driver.calls
    driver.name = "another"
    measured(CudaBackend(driver), lowered, tmp_path)
    assert "launch" in driver.calls
    one, other = tmp_path.iterdir()
    one.write_bytes(other.read_bytes())
    was_measured = set()
    for name in ("fake", "another"):
        (driver := FakeDriver()).name = name
        measured(CudaBackend(driver), lowered, tmp_path)
        was_measured.add("launch" in driver.calls)
    assert was_measured == {True, False}, "the file at the place of another one is not used"
    (tmp_path / next(tmp_path.iterdir()).name).write_bytes(b"{}")
    measured(CudaBackend(FakeDriver()), lowered, tmp_path)


def test_measuring_leaves_nothing_behind(lowered: Lowered) -> None:
    driver = FakeDriver()
    backend = CudaBackend(driver)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    pinned_bytes = driver.pinned_bytes
    backend.measure(lowered, store, None, lambda text: None)
    assert driver.pinned_bytes == pinned_bytes


@pytest.mark.parametrize(
    ("scratch_bytes", "small_bytes"), [(0, 0), (3 * MIB, 0), (3 * MIB, 3 * MIB)], ids=["none", "one", "several"]
)
def test_a_plan_made_from_a_measurement_runs(lowered: Lowered, scratch_bytes: int, small_bytes: int) -> None:
    """Whatever scratch its kernels take: one tensor, or several small ones that need segments of their own."""
    driver = FakeDriver()
    driver.kernel_bytes, driver.small_tensors_bytes = scratch_bytes, small_bytes
    backend = CudaBackend(driver)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    sized, profiles = backend.measure(lowered, store, None, lambda text: None)
    graph = sized.graphs[Bucket(2)]
    workspace = peak_activation_bytes(graph) + 2 * max(graph.tensors[i].nbytes for i in graph.parameters)
    memory = Memory(-(-workspace // 4096) * 4096, graph.parameter_bytes // 2)
    problem = Problem(graph, profiles[Bucket(2)], memory)
    plan = search(problem, limit=Limit(evaluations=20))
    arena = backend.arena(plan.memory.nbytes)
    program = backend.build(sized, plan, profiles[Bucket(2)], arena, Bases(0, plan.memory.partition_bytes), store)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = models.Wide(4, 264).eval()(*lowered.examples(Bucket(2)))
    backend.executor.load(program)
    assert torch.equal(backend.executor.run(program, lowered.examples(Bucket(2))).outputs[0], expected)
    assert program.admission.graph is not None

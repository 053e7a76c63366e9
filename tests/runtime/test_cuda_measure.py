"""What is measured on a device becomes the model's scratch and profile, and is kept."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import UNSET

from cohabit.planner.check import check
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.executor import CudaExecutor
from cohabit.runtime.cuda.profiling import link, measure
from cohabit.runtime.cuda.program import MOST_SCRATCH_BYTES
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.options import Options, Weights
from cohabit.runtime.stores.host import open_store
from tests.support.planner.graphs import PAGE, chain, profile_of
from tests.support.runtime import models
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.plans import streaming_plan, with_room

MIB = 1 << 20


@pytest.fixture(scope="module")
def lowered(narrow: Lowered) -> Lowered:
    return narrow


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("larger")
    return models.lowered(models.Wide(40, 512), {"x": torch.zeros(3, 512)}, folder, "wide", [1])


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_COPY_BYTES", 64 << 10)
    monkeypatch.setattr(measure, "_ROUNDS", 1)


def measured(
    backend: CudaBackend, lowered: Lowered, cache: Path | None = None
) -> tuple[Lowered, dict[Bucket, Profile]]:
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    return backend.measure(lowered, store, cache, lambda text: None)


def test_a_profile_has_every_batch_and_positive_figures(lowered: Lowered) -> None:
    driver = FakeDriver()
    backend = CudaBackend(driver)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    pinned_bytes = driver.pinned_bytes
    sized, profiles = backend.measure(lowered, store, None, lambda text: None)
    assert sorted(profiles) == [Bucket(1), Bucket(2)]
    assert driver.allocated_bytes == driver.open_pools == 0, "what was measured with is released"
    assert driver.pinned_bytes == pinned_bytes
    for batch, profile in profiles.items():
        assert profile.graph == sized.graphs[batch].fingerprint
        assert len(profile.op_seconds) == len(sized.graphs[batch].ops)
        assert min(profile.op_seconds) > 0
        assert min(profile.swap_in.bandwidth_bytes_per_s, profile.swap_out.bandwidth_bytes_per_s) > 0
        assert profile.compute_slowdown >= 1 <= profile.swap_slowdown


@pytest.mark.parametrize(("weights", "fewer"), [("bfloat16", 2.0), ("int8", 256 / 68)])
def test_encoded_weights_have_a_link_of_their_own_where_the_device_decodes(
    weights: Weights, fewer: float, tmp_path: Path
) -> None:
    options = Options(weights=weights)
    lowered = models.lowered(
        models.Wide(2, 264), {"x": torch.zeros(3, 264)}, tmp_path, "wide", [1], options=options
    )
    profile = measured(CudaBackend(FakeDriver()), lowered)[1][Bucket(1)]
    ((codec, own),) = dict(profile.encoded or ()).items()
    assert codec == weights
    # Biases stay as they are, and a segment ends with a page.
    assert own.bandwidth_bytes_per_s == pytest.approx(fewer * profile.swap_in.bandwidth_bytes_per_s, rel=0.1)
    assert own.latency_s >= profile.swap_in.latency_s
    backend = CudaBackend(FakeDriver())
    store = backend.staged(open_store("ram", lowered.weights_path, lowered.manifest), lowered.manifest)
    _, by_host = backend.measure(lowered, store, None, lambda text: None)
    assert by_host[Bucket(1)].encoded is UNSET, "the host decodes what passes through the ring"


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


def test_a_kernel_that_wants_more_than_any_may_have_is_not_the_measured_one(lowered: Lowered) -> None:
    """cuDNN tries its plans in order, and the first may want more than the device has."""
    driver = FakeDriver()
    driver.plan_bytes = (MOST_SCRATCH_BYTES << 10, 3 * MIB)
    graph = lowered.graphs[Bucket(1)]
    sized = measured(CudaBackend(driver), lowered)[0].graphs[Bucket(1)]
    for before, after in zip(graph.ops, sized.ops, strict=True):
        scratch = after.scratch_bytes + sum(graph.tensors[i].nbytes for i in before.writes)
        assert 3 * MIB <= scratch < MOST_SCRATCH_BYTES


@pytest.mark.long
def test_a_model_larger_than_the_device_is_measured(wide: Lowered) -> None:
    """Op by op, with the parameters of one at a time; no plan of the test's device holds half of the weights."""
    graph = wide.graphs[Bucket(1)]
    driver = FakeDriver(total_bytes=graph.parameter_bytes * 3 // 4)
    sized, profiles = measured(CudaBackend(driver), wide)
    assert len(profiles[Bucket(1)].op_seconds) == len(graph.ops)
    assert driver.allocated_bytes == driver.open_pools == 0
    assert measure.resident(sized.graphs[Bucket(1)]).memory.nbytes > driver.memory().total_bytes


def test_a_layer_plan_has_one_op_s_parameters_in_memory(lowered: Lowered) -> None:
    graph = lowered.graphs[Bucket(1)]
    plan = measure._layer_plan(graph, 1 << 40)
    check(graph, None, plan)
    largest = max(sum(graph.tensors[i].nbytes for i in op.reads if i in graph.parameters) for op in graph.ops)
    assert largest <= plan.memory.partition_bytes < 2 * largest < graph.parameter_bytes


def test_a_run_corrects_the_sum_of_the_ops() -> None:
    assert measure._correction(ops_s=4.0, device_s=3.0, copies_s=0.0) == 0.75
    assert measure._correction(ops_s=4.0, device_s=13.0, copies_s=7.0) == 1.5
    assert measure._correction(ops_s=4.0, device_s=1000.0, copies_s=1001.0) == 0.25, "the copies hide the ops"
    graph = chain([PAGE] * 3)
    profile = profile_of(graph, op_s=1.0)
    layers = measure._layer_plan(graph, 1 << 40)
    taken_s = simulate(graph, layers, profile_of(graph, op_s=0.75)).latency_s
    assert measure._correction(profile.compute_s, taken_s, 3 * profile.swap_in.seconds(PAGE)) == 0.75


def test_one_process_at_a_time_measures_on_a_device(
    lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opens the lock for itself, as processes do. Who waited finds what the other one has measured."""
    measuring, most, done = 0, 0, list[str]()
    made = measure._measure

    def observed(*args: object) -> measure.Measurement:
        nonlocal measuring, most
        measuring += 1
        most = max(most, measuring)
        found = made(*args)  # type: ignore[arg-type]
        measuring -= 1
        done.append("measured")
        return found

    monkeypatch.setattr(measure, "_measure", observed)
    threads = [
        threading.Thread(target=lambda: measured(CudaBackend(FakeDriver()), lowered, tmp_path)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, done) == (1, ["measured"])


def test_a_measurement_runs_on_no_executor_that_serves(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend(FakeDriver())
    serving = backend.executors(2)
    run, used = CudaExecutor.run, set[int]()

    def noted(executor: CudaExecutor, *args: Any, **options: Any) -> Any:
        used.add(id(executor))
        return run(executor, *args, **options)

    monkeypatch.setattr(CudaExecutor, "run", noted)
    measured(backend, lowered)
    assert used
    assert not used & set(map(id, serving))


def test_a_store_that_is_staged_in_one_process_and_pinned_in_another_is_measured_once(
    lowered: Lowered, tmp_path: Path
) -> None:
    _, pinned = measured(CudaBackend(FakeDriver()), lowered, tmp_path)
    narrow = CudaBackend(FakeDriver(), pinned_limit_bytes=lowered.manifest.file_bytes - 1)
    store = narrow.open_store("ram", lowered.weights_path, lowered.manifest)
    assert store.staged
    _, staged = narrow.measure(lowered, store, tmp_path, lambda text: None, known_only=True)
    for bucket, profile in staged.items():
        assert profile.op_seconds == pinned[bucket].op_seconds
        assert profile.swap_in != pinned[bucket].swap_in


@pytest.mark.long
def test_a_measurement_is_kept_and_belongs_to_its_device(lowered: Lowered, tmp_path: Path) -> None:
    first = measured(CudaBackend(FakeDriver()), lowered, tmp_path)
    driver = FakeDriver()
    again = measured(CudaBackend(driver), lowered, tmp_path)
    assert (again[0].graphs, again[1]) == (first[0].graphs, first[1])
    assert "launch" not in driver.calls
    driver.name = "another"
    measured(CudaBackend(driver), lowered, tmp_path)
    assert "launch" in driver.calls
    one, other = tmp_path.glob("cuda-*.json")
    one.write_bytes(other.read_bytes())
    was_measured = set()
    for name in ("fake", "another"):
        (driver := FakeDriver()).name = name
        measured(CudaBackend(driver), lowered, tmp_path)
        was_measured.add("launch" in driver.calls)
    assert was_measured == {True, False}, "the file at the place of another one is not used"
    next(tmp_path.glob("cuda-*.json")).write_bytes(b"{}")
    measured(CudaBackend(FakeDriver()), lowered, tmp_path)


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
        expected = models.Wide(5, 264).eval()(*lowered.examples(Bucket(2)))
    backend.executor.load(program)
    assert torch.equal(backend.executor.run(program, lowered.examples(Bucket(2))).outputs[0], expected)
    assert program.admission.graph is not None


def test_measuring_again_and_again_takes_no_more_of_the_device(lowered: Lowered, tmp_path: Path) -> None:
    """Its streams, for which libraries keep workspaces, are used again; its staging memory is released."""
    options = Options(weights="int8")
    encoded = models.lowered(
        models.Wide(4, 264), {"x": torch.zeros(3, 264)}, tmp_path, "int8", [2], options=options
    )
    driver = FakeDriver()
    backend = CudaBackend(driver)
    store = backend.open_store("ram", encoded.weights_path, encoded.manifest)
    backend.measure(encoded, store, None, lambda text: None)
    before, streams = driver.memory(), len(driver._streams)
    for _ in range(2):
        backend.measure(encoded, store, None, lambda text: None)
    assert "decode" in driver.calls
    assert driver.memory() == before
    assert len(driver._streams) == streams
    assert before.process_bytes == backend.outside_bytes == 0


def test_lanes_capture_while_a_measurement_waits_for_another_process(lowered: Lowered, tmp_path: Path) -> None:
    backend = CudaBackend(FakeDriver())
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    arena = backend.arena(32 * MIB)
    plan = with_room(streaming_plan(lowered.graphs[Bucket(2)]), 6 * MIB)
    program = backend.build(lowered, plan, None, arena, Bases(16 * MIB, 0), store)
    loaded = threading.Event()

    def wait_for(folder: Path | None, device_id: str) -> AbstractContextManager[None]:
        """The other process ends once the lane has loaded its program."""
        assert loaded.wait(20)
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as deploy:
        patch.setattr(measure, "_only_process", wait_for)
        measuring = deploy.submit(measured, backend, lowered, tmp_path)
        backend.executor.load(program)
        loaded.set()
        measuring.result()


def test_a_lane_captures_before_or_after_a_measurement_and_replays_meanwhile(lowered: Lowered) -> None:
    backend = CudaBackend(FakeDriver())
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    arena = backend.arena(64 * MIB)
    plan = with_room(streaming_plan(lowered.graphs[Bucket(2)]), 6 * MIB)
    replayed, captured = (
        backend.build(lowered, plan, None, arena, Bases(16 * MIB, at * MIB), store) for at in (0, 32)
    )
    backend.executor.load(replayed)
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()
    made = measure._measure

    def slow(*args: Any) -> measure.Measurement:
        begun.set()
        assert go_on.wait(20)
        found = made(*args)
        order.append("measured")
        return found

    def load() -> None:
        backend.executors(2)[1].load(captured)
        order.append("captured")

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(measure, "_measure", slow)
        measuring = threads.submit(measured, backend, lowered)
        assert begun.wait(20)
        loading = threads.submit(load)
        backend.executor.run(replayed, lowered.examples(Bucket(2)))
        assert order == []
        go_on.set()
        measuring.result()
        loading.result()
    assert order == ["measured", "captured"]

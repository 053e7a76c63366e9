"""Models with dynamic dimensions beside the batch: every request's own shape runs in the program of a bucket."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket, ShapeBuckets
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda import capture
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.exported import from_program
from cohabit.runtime.lowering.lower import MOST_BUCKETS, Lowered, _buckets, cached, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import DEFAULTS, Options
from tests.support.runtime.backends import cpu, fake_cuda, fake_streams, has_gpu, real_cuda
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.observing import addresses, note_held
from tests.support.runtime.plans import offloading_plan, streaming_plan, with_room

MIB = 1 << 20
BATCHES = (1, 3)


class Encoder(nn.Module):
    """Attention with a mask over token ids, positions from a table, and an output per token and per sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length))
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        allowed = mask[:, None, None, :].expand(batch, 1, length, length) > 0
        y = nn.functional.scaled_dot_product_attention(q, k, v, allowed)
        x = self.norm(x + self.out(y.transpose(1, 2).reshape(batch, length, 32)))
        return {"tokens": self.head(x), "pooled": torch.tanh(x.sum(1) / length)}


class Derived(nn.Module):
    """Outputs of other sizes than the input's, and arithmetic with the size."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        length = x.shape[1]
        half = torch.relu(x)[:, ::2]
        return {
            "twice": torch.cat([x, x.flip(1)], 1),
            "longer": nn.functional.pad(x, (0, 0, 0, 1)),
            "half": half * half.shape[1],
            "scaled": (x * 2).sum(1) / length**0.5,
            "flat": (x + 1).transpose(1, 2).reshape(x.shape[0], 4 * length),
            "square": torch.tril(torch.ones(length, length)) + x.sum((1, 2))[:, None, None],
        }


class Image(nn.Module):
    """Convolutions over images of any height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.norm(self.first(x)))
        y = torch.relu(self.second(x))
        return {"map": y, "pooled": self.head(y.mean((2, 3)))}


class Groups(nn.Module):
    """A length that must be a multiple of eight."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x.reshape(x.shape[0], x.shape[1] // 8, 8, 4)).sum(2)}


class Cross(nn.Module):
    """Attention of one sequence to another one of its own length; a third input has neither."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)

    def forward(self, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        key = self.key(k)
        return {"y": (q @ key.transpose(1, 2) * scale[:, None]).softmax(-1) @ key}


Examples = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its inputs at a batch and sizes, what is dynamic, and the sizes to plan for and to try."""

    make: Callable[[], nn.Module]
    inputs: Callable[..., Examples]
    dims: dict[str, dict[int, Any]]
    buckets: tuple[int, ...]
    tried: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...] = BATCHES


def ids_and_mask(batch: int, length: int) -> Examples:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, 1 + length // 2 :] = 0
    return {"ids": torch.randint(0, 50, (batch, length)), "mask": mask}


BATCH = Dim("batch", min=1, max=8)
LENGTH = Dim("length", min=1, max=64)
EIGHTS = Dim("eights", min=1, max=8)
CASES = {
    "encoder": Case(
        Encoder,
        ids_and_mask,
        {"ids": {0: BATCH, 1: LENGTH}, "mask": {0: BATCH, 1: LENGTH}},
        (8, 32, 64),
        ((1,), (2,), (7,), (8,), (9,), (31,), (64,)),
    ),
    "derived": Case(
        Derived,
        lambda batch, length: {"x": torch.randn(batch, length, 4)},
        {"x": {0: BATCH, 1: Dim("length", min=3, max=16)}},
        (5, 16),
        ((3,), (4,), (5,), (6,), (16,)),
    ),
    "image": Case(
        Image,
        lambda batch, height, width: {"x": torch.randn(batch, 3, height, width)},
        {"x": {0: BATCH, 2: Dim("height", min=4, max=16), 3: Dim("width", min=4, max=16)}},
        (8, 16),
        ((4, 4), (8, 5), (9, 16), (16, 16)),
    ),
    "groups": Case(
        Groups,
        lambda batch, length: {"x": torch.randn(batch, length, 4)},
        {"x": {0: BATCH, 1: 8 * EIGHTS}},
        (20, 64),
        ((8,), (16,), (24,), (64,)),
    ),
    "cross": Case(
        Cross,
        lambda batch, one, other: {
            "q": torch.randn(batch, one, 8),
            "k": torch.randn(batch, other, 8),
            "scale": torch.randn(batch, 1),
        },
        {"q": {0: BATCH, 1: LENGTH}, "k": {0: BATCH, 1: Dim("other", min=2, max=32)}, "scale": {0: BATCH}},
        (8, 32),
        ((1, 2), (3, 32), (8, 9), (32, 5)),
    ),
    "fixed_batch": Case(
        Encoder, ids_and_mask, {"ids": {1: LENGTH}, "mask": {1: LENGTH}}, (16, 64), ((2,), (16,), (40,)), (2,)
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make().eval()


def exported(name: str, path: Path) -> Path:
    case = CASES[name]
    example = case.inputs(max(case.batches), *case.tried[-2])
    program = torch.export.export(made(name), (), kwargs=example, dynamic_shapes=case.dims)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def lowered_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Lowered]:
    folder, known = tmp_path_factory.mktemp("dynamic"), dict[tuple[str, bool], Lowered]()

    def lowered(name: str, packed: bool) -> Lowered:
        path = folder / name / "model.pt2"
        if not path.exists():
            exported(name, path)
        if (name, packed) not in known:
            case = CASES[name]
            known[name, packed] = lower(
                path,
                name,
                case.batches,
                folder / "cache",
                options=Options(packed=packed),
                shape_buckets=ShapeBuckets(case.buckets),
            )
        return known[name, packed]

    return lowered


def bucket_of(lowered: Lowered, batch: int, sizes: tuple[int, ...]) -> Bucket:
    return min(
        b for b in lowered.buckets if b.batch == batch and all(x >= y for x, y in zip(b.sizes, sizes, strict=True))
    )


def run(
    backend: Backend, lowered: Lowered, plan: Plan, inputs: Examples, held: dict[int, int] | None = None
) -> list[torch.Tensor]:
    """Load a plan by itself, and run it three times: where there are graphs, the second run captures smaller shapes.

    `held` gets the bytes outside of the arena before each step."""
    roomy = with_room(plan, 64 * MIB)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    arena = backend.arena(roomy.memory.nbytes)
    program = backend.build(lowered, roomy, None, arena, Bases(0, plan.memory.partition_bytes), store)
    backend.executor.load(program)
    if held is not None:
        program = note_held(held, program, addresses(arena))
    for _ in range(3):
        outputs = backend.executor.run(program, [inputs[p.name].clone() for p in lowered.inputs]).outputs
    backend.executor.release(program)
    arena.close()
    store.close()
    return outputs


def eager(name: str, inputs: Examples) -> list[torch.Tensor]:
    with torch.no_grad():
        return pytree.tree_leaves(made(name)(**{k: v.clone() for k, v in inputs.items()}))


@pytest.fixture(
    params=[
        pytest.param((cpu, False), id="cpu"),
        pytest.param((cpu, True), id="cpu-packed"),
        pytest.param((fake_cuda, False), id="fake-cuda"),
        pytest.param((fake_streams, False), id="fake-cuda-uncaptured"),
        pytest.param(
            (real_cuda, False),
            id="cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")],
        ),
    ],
)
def backend_and_packed(request: pytest.FixtureRequest) -> Iterator[tuple[Backend, bool]]:
    make, packed = request.param
    backend = make()
    yield backend, packed
    backend.close()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_size_equals_eager_and_has_the_same_bits_at_every_budget(
    name: str, backend_and_packed: tuple[Backend, bool], lowered_cases: Callable[[str, bool], Lowered]
) -> None:
    backend, packed = backend_and_packed
    lowered = lowered_cases(name, packed)
    for batch, sizes in product(CASES[name].batches, CASES[name].tried):
        graph = lowered.graphs[bucket_of(lowered, batch, sizes)]
        inputs = CASES[name].inputs(batch, *sizes)
        expected = eager(name, inputs)
        kept = run(backend, lowered, resident_plan(graph), inputs)
        swapped = run(backend, lowered, streaming_plan(graph), inputs)
        for want, one, other in zip(expected, kept, swapped, strict=True):
            torch.testing.assert_close(one, want, atol=1e-4 * float(want.abs().max()), rtol=0)
            assert torch.equal(one, other), (batch, sizes)


def test_smaller_shapes_are_replayed_from_their_third_time_on_and_graphs_are_limited(
    lowered_cases: Callable[[str, bool], Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MOST_SIZED", 2)
    lowered, driver = lowered_cases("encoder", False), FakeDriver()
    backend = CudaBackend(driver)
    plan = with_room(streaming_plan(lowered.graphs[bucket_of(lowered, 1, (9,))]), 64 * MIB)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    arena = backend.arena(plan.memory.nbytes)
    program = backend.build(lowered, plan, None, arena, Bases(0, plan.memory.partition_bytes), store)
    backend.executor.load(program)
    graphs = driver.graphs

    def calls(length: int) -> set[str]:
        inputs = ids_and_mask(1, length)
        driver.calls.clear()
        found = backend.executor.run(program, [inputs[p.name] for p in lowered.inputs]).outputs
        for want, one in zip(eager("encoder", inputs), found, strict=True):
            torch.testing.assert_close(one, want, atol=1e-5, rtol=0)
        return {"launch", "capture", "replay"} & set(driver.calls)

    for length in (9, 10, 11):
        assert calls(length) == {"launch"}
        assert calls(length) == {"launch", "capture", "replay"}
        assert calls(length) == {"replay"}
    assert driver.graphs == graphs + 2, "the one used least recently is gone"
    assert calls(9) == {"launch"}
    assert calls(11) == {"replay"}
    driver.uncapturable = "the test says so"
    assert calls(9) == {"launch", "capture"}
    driver.uncapturable = None
    assert calls(12) == calls(12) == calls(12) == {"launch"}, "a pool in which a capture failed has no other"
    backend.close()
    store.close()


@pytest.mark.parametrize("name", CASES)
def test_no_size_holds_more_than_the_plan_counts(name: str, lowered_cases: Callable[[str, bool], Lowered]) -> None:
    lowered, backend = lowered_cases(name, True), cpu()
    for batch, sizes in product(CASES[name].batches, CASES[name].tried):
        bucket = bucket_of(lowered, batch, sizes)
        graph, held = lowered.graphs[bucket], dict[int, int]()
        run(backend, lowered, resident_plan(graph), CASES[name].inputs(batch, *sizes), held)
        counted = live_before(graph)
        assert held.keys() == set(range(len(graph.ops)))
        assert all(held[n] <= counted[n] for n in held), (batch, sizes)
        assert sizes != bucket.sizes or held == counted, "the largest shape takes what the plan counts"
    backend.close()


def live_before(graph: Graph) -> dict[int, int]:
    """Bytes of inputs and activations before each op, each of which is dropped after its last use."""
    made = {t: n for n, op in enumerate(graph.ops) for t in op.writes}
    last = {t: n for n, op in enumerate(graph.ops) for t in op.touched} | dict.fromkeys(
        graph.outputs, len(graph.ops)
    )
    ours = [i for i, t in enumerate(graph.tensors) if t.kind != "parameter"]
    return {
        n: sum(graph.tensors[t].nbytes for t in ours if made.get(t, -1) < n <= last.get(t, len(graph.ops)))
        for n in range(len(graph.ops))
    }


def test_offloaded_activations_come_back_at_every_size(lowered_cases: Callable[[str, bool], Lowered]) -> None:
    lowered = lowered_cases("encoder", False)
    for make in (cpu, fake_cuda):
        backend = make()
        for sizes in ((3,), (9,), (64,)):
            inputs = ids_and_mask(3, *sizes)
            plan = offloading_plan(lowered.graphs[bucket_of(lowered, 3, sizes)])
            for want, got in zip(eager("encoder", inputs), run(backend, lowered, plan, inputs), strict=True):
                torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)
        backend.close()


@pytest.mark.long
def test_buckets_are_powers_of_two_up_to_the_largest_size(tmp_path: Path) -> None:
    lowered = lower(exported("encoder", tmp_path / "model.pt2"), "encoder", [2], tmp_path / "cache")
    assert lowered.buckets == tuple(Bucket(2, (size,)) for size in (1, 16, 32, 64))
    again = cached(lowered.archive, "encoder", [2], tmp_path / "cache", DEFAULTS)
    assert (again.buckets, again.dynamic, again.inputs, again.outputs) == (
        lowered.buckets,
        lowered.dynamic,
        lowered.inputs,
        lowered.outputs,
    )
    assert again.graphs == lowered.graphs


@pytest.mark.long
def test_derived_sizes_are_known_for_every_size(lowered_cases: Callable[[str, bool], Lowered]) -> None:
    lowered = lowered_cases("derived", False)
    for length in (3, 7, 16):
        expected = [tuple(t.shape) for t in eager("derived", {"x": torch.randn(2, length, 4)})]
        assert [p.at(2, lowered.dynamic.symbols((length,))) for p in lowered.outputs] == expected


@pytest.mark.parametrize(
    ("dims", "buckets", "reason"),
    [
        ({0: BATCH, 1: Dim("length", min=2)}, (), "was exported without a largest size"),
        (
            {0: BATCH, 1: Dim("length", min=2)},
            (),
            "the model's own parameter cohabit.shape_buckets of config.pbtxt",
        ),
        ({0: BATCH, 1: Dim("length", min=32, max=64)}, (16,), "is 32 or larger"),
        ({0: BATCH, 1: LENGTH}, tuple(range(2, 60)), "are 118 combinations to plan, the limit is 64"),
    ],
)
def test_buckets_that_cannot_be_are_refused_with_the_way_out(
    dims: dict[int, Any], buckets: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    program = torch.export.export(Doubling(), (), kwargs={"x": torch.randn(3, 40, 4)}, dynamic_shapes={"x": dims})
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        lower(tmp_path / "model.pt2", "refused", [1, 2], tmp_path / "cache", shape_buckets=ShapeBuckets(buckets))
    assert "dimension 1 of input x" in str(refused.value)
    assert "--shape-buckets" in str(refused.value)


def test_three_dynamic_dimensions_have_as_many_buckets_as_the_limit_allows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dims = {0: BATCH} | {axis: Dim(f"size{axis}", min=1, max=64) for axis in (1, 2, 3)}
    program = torch.export.export(
        Doubling(), (), kwargs={"x": torch.randn(3, 40, 41, 42)}, dynamic_shapes={"x": dims}
    )
    model = from_program("three", program)
    with caplog.at_level(logging.WARNING):
        buckets = _buckets(model, [1, 2], ShapeBuckets())
    assert len(buckets) <= MOST_BUCKETS
    assert all(d.buckets[0] == 1 and d.buckets[-1] == 64 for d in model.dynamic.dimensions)
    assert len(buckets) > MOST_BUCKETS / 2
    assert "fewer sizes of dynamic dimensions are planned than usual" in caplog.text
    with pytest.raises(UnsupportedModel, match="combinations to plan, the limit is 64"):
        _buckets(from_program("three", program), [1], ShapeBuckets((1, 16, 32, 48, 64)))
    model = from_program("three", program)
    _buckets(model, [1, 2], ShapeBuckets((5,), (("x.2", (8, 24)), ("other", (3,)))))
    assert [d.buckets for d in model.dynamic.dimensions] == [(1, 5), (1, 8, 24), (1, 5)]
    model = from_program("three", program)
    _buckets(model, [1, 2], ShapeBuckets((), (("x.2", (8, 24)),)))
    assert model.dynamic.dimensions[1].buckets == (1, 8, 24), "the others are thinned"
    with pytest.raises(
        UnsupportedModel, match=r"names x\.0, which is not a dynamic dimension .* has x\.1, x\.2, x\.3"
    ):
        _buckets(model, [1, 2], ShapeBuckets((), (("x.0", (8,)),)))


class Framed(nn.Module):
    """Frames of four samples, of which an LSTM's export takes the number as fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.recurrent = nn.Conv1d(1, 4, 4, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.frames(x[:, None]).mT)[0]


@pytest.mark.long
def test_an_export_that_fixes_a_dynamic_size_is_refused_with_the_condition(tmp_path: Path) -> None:
    dims = {0: BATCH, 1: 4 * Dim("frames", min=2, max=64)}
    program = torch.export.export(Framed(), (), kwargs={"x": torch.randn(3, 80)}, dynamic_shapes={"x": dims})
    torch.export.save(program, tmp_path / "model.pt2")
    needs = r"dimension 1 of input x is 8 or larger; its export requires .* == 20, so export it with a fixed size$"
    with pytest.raises(UnsupportedModel, match=needs):
        lower(tmp_path / "model.pt2", "refused", [1], tmp_path / "cache")
    lowered = lower(tmp_path / "model.pt2", "fixed", [1, 2], tmp_path / "cache")
    assert lowered.buckets == (Bucket(2, (80,)),), "what its conditions leave"


class Checked(nn.Module):
    """A length that the model checks itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[1] % 4 == 0)
        torch._check(x.shape[1] != 20)
        return x.reshape(x.shape[0], x.shape[1] // 4, 16).sum(2)


def test_buckets_that_are_too_small_are_the_reason_and_no_condition_of_the_export(tmp_path: Path) -> None:
    dims = {0: BATCH, 1: Dim.DYNAMIC(min=32, max=64)}
    program = torch.export.export(Checked(), (), kwargs={"x": torch.randn(3, 40, 4)}, dynamic_shapes={"x": dims})
    torch.export.save(program, tmp_path / "model.pt2")
    with pytest.raises(UnsupportedModel, match=r"is 32 or larger; --shape-buckets has 16$"):
        lower(tmp_path / "model.pt2", "refused", [1, 2], tmp_path / "cache", shape_buckets=ShapeBuckets((16,)))


@pytest.mark.parametrize("deferred", [False, True], ids=["guards", "assertions"])
def test_a_request_may_have_the_sizes_that_the_exported_program_takes(deferred: bool, tmp_path: Path) -> None:
    program = torch.export.export(
        Checked(),
        (),
        kwargs={"x": torch.randn(3, 16, 4)},
        dynamic_shapes={"x": {0: BATCH, 1: Dim.DYNAMIC(max=40)}},
        prefer_deferred_runtime_asserts_over_guards=deferred,
    )
    torch.export.save(program, tmp_path / "model.pt2")
    lowered = lower(tmp_path / "model.pt2", "checked", [2], tmp_path / "cache")
    assert [bucket.sizes for bucket in lowered.buckets] == [(16,), (32,), (40,)]
    (dimension,), module = lowered.dynamic.dimensions, program.module()
    for length in range(1, 41):
        try:
            module(x=torch.randn(2, length, 4))
        except (AssertionError, RuntimeError):
            taken = False
        else:
            taken = True
        symbols = lowered.dynamic.symbols((length,))
        assert (dimension.allows(length) and lowered.dynamic.broken_constraint(symbols) is None) == taken, length


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

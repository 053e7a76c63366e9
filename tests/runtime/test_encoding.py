"""Weights are stored and copied in fewer bytes: with the bits of plain storage, or with outputs close enough."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from msgspec import UNSET, structs
from torch import nn

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn
from cohabit.planner.profile import Link
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.cuda import decoding as device_decoding
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.transfers import Transfers
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering import lower as lowering
from cohabit.runtime.lowering.encoding.choice import LEAST_COSINE, cosine
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.weights import manifest_of, read
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import Options, Weights
from cohabit.runtime.stores.host import open_store
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, fake_cuda, fake_staged, fake_streams, has_gpu, opened, real_cuda
from tests.support.runtime.plans import streaming_plan

MIB = 1 << 20
STORES: tuple[StoreKind, ...] = ("ram", "file")


class Encoder(nn.Module):
    """A table that stays in the host, attention, norms, and a layer whose numbers are not a multiple of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 200, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("positions", torch.arange(12))
        self.place = nn.Embedding(12, 96)
        self.odd, self.head = nn.Linear(96, 67), nn.Linear(67, 61, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.embed(tokens) + self.place(self.positions))
        return self.head(torch.tanh(self.odd(x)))


EXAMPLES = {"tokens": torch.zeros(3, 12, dtype=torch.int64)}


@pytest.fixture(scope="module")
def born_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Archives of a model whose weights were numbers of that type once."""
    folder = tmp_path_factory.mktemp("encoders")

    @cache
    def archive(kind: str) -> Path:
        torch.manual_seed(0)
        models.export(Encoder().to(getattr(torch, kind)).float(), EXAMPLES, folder / kind / "model.pt2")
        return folder / kind / "model.pt2"

    return archive


def lowered_model(
    archive: Path, folder: Path, *, weights: Weights = "float32", packed: bool = True, exact: bool = True
) -> Lowered:
    options = Options(packed=packed, weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        if not exact:
            patch.setattr(lowering, "exact_codecs", lambda weights: {})
            patch.setattr(lowering, "shorten_tables", lambda model: None)
        return lower(archive, "encoder", [1, 2], folder, options=options)


class Pixels(nn.Module):
    """Convolutions over sizes for which oneDNN has several layouts, and layers of every size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 40, 3, stride=2), nn.Conv2d(40, 48, 3, padding=1)
        self.point, self.head = (
            nn.Conv2d(48, 96, 1),
            nn.Sequential(nn.Linear(96, 400), nn.ReLU(), nn.Linear(400, 70)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        return self.head(self.point(torch.relu(x)).mean((2, 3)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "examples"),
    [(Encoder, EXAMPLES), (Pixels, {"x": torch.randn(3, 3, 17, 17)})],
    ids=["encoder", "pixels"],
)
def test_8_bits_round_alike_whatever_batches_are_planned(
    model: Callable[[], nn.Module], examples: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    archive, options = tmp_path / "model.pt2", Options(packed=True, weights="int8")
    models.export(model(), examples, archive)
    planned = ([1], [2, 5], [64])
    files = {
        lower(archive, "model", batches, tmp_path / str(n), options=options).manifest.fingerprint
        for n, batches in enumerate(planned)
    }
    assert len(files) == 1


def plans(graph: Graph) -> list[Plan]:
    half = frozenset(graph.parameters[::2])
    return [resident_plan(graph), streaming_plan(graph, half), streaming_plan(graph)]


def answers(lowered: Lowered, make: Callable[[], Backend] = cpu) -> list[torch.Tensor]:
    """What is answered at three budgets from two stores."""
    tokens = torch.randint(0, 5000, (2, 12), generator=torch.Generator().manual_seed(1))
    found = []
    with opened(make, lowered) as bench:
        for kind in STORES:
            store = bench.backend.open_store(kind, lowered.weights_path, lowered.manifest)
            for plan in plans(bench.graph):
                (answer,) = bench.executor.run(bench.program(plan, store), [tokens.clone()]).outputs
                found.append(answer.clone())
            store.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("make", [cpu, fake_cuda, fake_staged])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_weights_born_in_16_bits_are_stored_so_with_the_bits_of_plain_storage(
    kind: str, make: Callable[[], Backend], born_in: Callable[[str], Path]
) -> None:
    archive, packed = born_in(kind), make is cpu
    half = lowered_model(archive, archive.parent / "half", packed=packed)
    plain = lowered_model(archive, archive.parent / "plain", packed=packed, exact=False)
    assert half.manifest.file_bytes < 0.53 * plain.manifest.file_bytes
    assert half.encoding is None, "nothing is rounded"
    assert half.weight_bytes == pytest.approx(plain.manifest.file_bytes, abs=8192)
    assert {table.dtype for table in half.manifest.tables} == {kind}
    (expected, *others) = answers(plain, make)
    for answer in (*others, *answers(half, make)):
        assert torch.equal(answer, expected)


@pytest.mark.long
def test_weights_that_need_32_bits_stay_as_they_are(born_in: Callable[[str], Path]) -> None:
    archive = born_in("float32")
    lowered = lowered_model(archive, archive.parent)
    assert not any(segment.is_encoded for segment in lowered.manifest.segments)
    assert {tensor.codec for graph in lowered.graphs.values() for tensor in graph.tensors} == {UNSET}


@pytest.mark.long
@pytest.mark.parametrize(("weights", "least"), [("bfloat16", 0.99999), ("int8", 0.9999)])
def test_lossy_weights_answer_alike_at_every_budget_and_close_to_exact_ones(
    weights: Weights, least: float, born_in: Callable[[str], Path]
) -> None:
    archive = born_in("float32")
    lossy = lowered_model(archive, archive.parent, weights=weights)
    exact, (first, *others) = answers(lowered_model(archive, archive.parent)), answers(lossy)
    assert all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, exact[0])
    assert cosine(first.double(), exact[0].double()) > least
    assert lossy.encoding is not None
    (accuracy,) = lossy.encoding.outputs
    assert accuracy.cosine is not None
    assert accuracy.cosine > least
    assert lossy.encoding.kept == ()
    share = 0.55 if weights == "bfloat16" else 0.31
    assert lossy.manifest.file_bytes < share * lossy.weight_bytes
    vectors = [p for s in lossy.manifest.segments for p in s.pieces if len(p.shape) < 2]
    assert vectors
    assert {piece.codec for piece in vectors} == {"plain"}


ON_DEVICES = [
    *(pytest.param(partial(fake_cuda, seed), id=f"fake-{seed}") for seed in range(4)),
    pytest.param(fake_streams, id="fake-uncaptured"),
    pytest.param(
        real_cuda, id="cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]
    ),
]


def returning_plan(graph: Graph) -> Plan:
    """Two places for the weights of one op each. Those of the first op are resident, leave, and return at the end."""
    own = [[i for i in op.reads if graph.tensors[i].kind == "parameter"] for op in graph.ops]
    own = [weights for weights in own if weights]
    readers = [n for n, op in enumerate(graph.ops) if any(graph.tensors[i].kind == "parameter" for i in op.reads)]
    place_bytes = max(sum(graph.tensors[i].nbytes for i in weights) for weights in own)
    pool = 4096 * (1 + sum(t.aligned_bytes for t in graph.tensors if t.kind != "parameter") // 4096)

    def addresses(k: int) -> list[tuple[int, Address]]:
        sizes = [graph.tensors[i].nbytes for i in own[k]]
        offsets = accumulate(sizes, initial=k % 2 * place_bytes)
        return [(i, Address("partition", offset)) for i, offset in zip(own[k], offsets, strict=False)]

    steps: list[Step] = []
    emptied: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    for n in range(len(graph.ops)):
        waits: tuple[int, ...] = ()
        if n in readers and (k := readers.index(n)):
            steps += [SwapIn(i, address, emptied[k % 2]) for i, address in addresses(k)]
            waits = (len(steps) - 1,)
        steps.append(Compute(n, waits))
        if n in readers:
            k = readers.index(n)
            emptied[k % 2] = (len(steps) - 1,)
            steps += [Drop(i) for i in own[k]]
    steps += [SwapIn(i, address, emptied[0]) for i, address in addresses(0)]
    residents = tuple(Placement(i, address) for i, address in addresses(0))
    return Plan(graph.fingerprint, "", Memory(pool, 2 * place_bytes), pool, residents, tuple(steps))


@pytest.mark.parametrize("make", ON_DEVICES)
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_device_decodes_as_the_host_does(
    weights: Weights, make: Callable[[], CudaBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are divided, since they are larger than a slot, beside plain ones. Two models take
    turns: the copies that return the one's weights are in progress during the other's inference."""
    monkeypatch.setattr(device_decoding, "SLOT_BYTES", 64 << 10)
    monkeypatch.setattr(Transfers, "submit", Transfers.issue)  # in progress whatever its thread does
    torch.manual_seed(0)
    lowered = models.lowered(
        models.Wide(5, 264), {"x": torch.zeros(3, 264)}, tmp_path, "wide", [1, 2], options=Options(weights=weights)
    )
    assert any(segment.is_encoded for segment in lowered.manifest.segments)
    x = torch.rand(6, 2, 264)
    with opened(make, lowered) as bench:
        plan = returning_plan(bench.graph)
        stores = {
            "device": bench.store,
            "host": bench.host(open_store("ram", lowered.weights_path, lowered.manifest)),
        }
        found: dict[str, list[torch.Tensor]] = {}
        for where, store in stores.items():
            programs = []
            for n in range(2):
                own = replace(lowered, name=f"{where}-{n}")
                bases = Bases(n * 8 * MIB, n * 8 * MIB + plan.memory.partition_bytes)
                programs.append(bench.beside(own, plan, bases, store))
            found[where] = [
                bench.executor.run(programs[n % 2], [x[n].clone()]).outputs[0].clone() for n in range(len(x))
            ]
        for on_device, on_host in zip(found["device"], found["host"], strict=True):
            assert torch.equal(on_device, on_host)


class Sensitive(nn.Module):
    """One layer reads differences that 8 bits lose: in each block one weight is far larger, and multiplied by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.robust = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
        with torch.no_grad():
            self.fine.weight[:, ::16] = 1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = (torch.arange(128) % 16 != 0).float()
        return self.robust(self.fine(x * keep))


@pytest.mark.parametrize("packed", [True, False])
def test_a_layer_that_8_bits_would_spoil_stays_exact_and_is_named(packed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = Options(packed=packed, weights="int8")
    lowered = models.lowered(Sensitive().eval(), {"x": torch.zeros(3, 128)}, tmp_path, "m", [1, 2], options=options)
    assert lowered.encoding is not None
    (kept,) = lowered.encoding.kept
    assert "fine" in kept
    codecs = {p.name: p.codec for s in lowered.manifest.segments for p in s.pieces if len(p.shape) > 1}
    assert sorted(codecs.values()) == ["int8", "plain"]
    assert codecs[kept] == "plain"
    (accuracy,) = lowered.encoding.outputs
    assert accuracy.cosine is not None
    assert accuracy.cosine >= LEAST_COSINE
    again = lower(tmp_path / "model.pt2", "m", [1, 2], tmp_path / "cache", options=options)
    assert again.encoding == lowered.encoding, "the cache keeps it"


class Tables(nn.Module):
    """Two tables whose names could be those of one encoded table's parts, and a mask of the most negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.rows_weight_scales = nn.Embedding(5000, 96), nn.Parameter(torch.randn(5000, 96))
        self.head = nn.Linear(96, 96)
        self.register_buffer("mask", torch.full((96, 96), torch.finfo(torch.float32).min).triu(1))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.rows(tokens) - nn.functional.embedding(tokens, self.rows_weight_scales)
        return self.head(x), (x[..., None] * x[..., None, :] + self.mask).softmax(-1)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_tables_have_names_of_their_own_and_extreme_numbers_stay(weights: Weights, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tables().eval()
    options = Options(packed=True, weights=weights)
    lowered = models.lowered(model, EXAMPLES, tmp_path, "tables", [1, 2], options=options)
    tokens = torch.randint(0, 5000, (2, 12), generator=torch.Generator().manual_seed(1))
    with opened(cpu, lowered) as bench, torch.no_grad():
        found = bench.executor.run(bench.program(resident_plan(bench.graph)), [tokens.clone()]).outputs
        for own, expected in zip(found, model(tokens), strict=True):
            assert bool(own.isfinite().all())
            assert cosine(own.double(), expected.double()) > 0.9998


def test_a_table_with_nan_keeps_it_where_8_bits_are_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tables().eval()
    with torch.no_grad():
        model.rows.weight[7] = torch.nan
    options = Options(packed=True, weights="int8")
    lowered = models.lowered(model, EXAMPLES, tmp_path, "tables", [1, 2], options=options)
    tokens = torch.full((2, 12), 7)
    with opened(cpu, lowered) as bench:
        found = bench.executor.run(bench.program(resident_plan(bench.graph)), [tokens]).outputs
        assert all(bool(output.isnan().all()) for output in found)


@pytest.mark.long
def test_a_damaged_encoded_file_is_found_at_the_start_and_in_a_verified_read(
    born_in: Callable[[str], Path], tmp_path: Path
) -> None:
    lowered = lowered_model(born_in("bfloat16"), tmp_path)
    backend = CpuBackend(verify_reads=True)
    store = backend.open_store("file", lowered.weights_path, lowered.manifest)
    with lowered.weights_path.open("r+b") as file:
        file.seek(lowered.manifest.segments[0].offset + lowered.manifest.segments[0].file_bytes - 7)
        file.write(b"\x55")
    assert read(lowered.weights_path) is None
    assert manifest_of(lowered.weights_path) == lowered.manifest
    whole = lowered_model(born_in("bfloat16"), tmp_path / "whole")
    with (
        opened(lambda: backend, whole) as bench,
        pytest.raises(DeviceError, match="was changed after it was loaded"),
    ):
        bench.program(resident_plan(bench.graph), store)


@pytest.mark.long
def test_plans_know_the_time_of_a_copy_with_its_codec(born_in: Callable[[str], Path], tmp_path: Path) -> None:
    archive = born_in("bfloat16")
    lowered = lowered_model(archive, archive.parent / "half")
    backend = CpuBackend(100e6)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    profile = backend.measure(lowered, store, tmp_path / "profiles", lambda text: None)[1][Bucket(2)]
    store.close()
    graph = lowered.graphs[Bucket(2)]
    encoded = [t for t in graph.tensors if t.codec == "bfloat16"]
    assert encoded
    large = max(encoded, key=lambda t: t.nbytes)
    assert profile.encoded is not UNSET
    assert [codec for codec, _ in profile.encoded] == ["bfloat16"], "it was measured"
    link = Link(1e-5, 250e6)  # how fast it is here is a matter of the machine
    profile = structs.replace(profile, encoded=(("bfloat16", link),))
    assert profile.swap_in_seconds(large) == link.seconds(large.nbytes)
    times = GraphArrays.of(graph, profile).swap_in_s
    assert times[graph.tensors.index(large)] == profile.swap_in_seconds(large)

"""Segments and tables that several models have are stored once on disk, and held once in memory."""

import gc
import hashlib
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cohabit.runtime import pieces
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.lowering import archive, weights
from cohabit.runtime.lowering import lower as lowering
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.weights import Manifest, WeightUse, lay_out
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import Options
from cohabit.runtime.pieces import HELD
from cohabit.runtime.stores.host import FileStore, Store, open_store
from tests.support.runtime import models

KIB = 1 << 10
Weights = Mapping[str, torch.Tensor]


def drawn(seed: int, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


def member(head: int, trunk: int = 0) -> Weights:
    """Weights of a model whose trunk's segments and table others have, if drawn from the same seed."""
    return {
        "first": drawn(trunk, 260 * KIB),
        "second": drawn(trunk + 1, 300 * KIB),
        "table": drawn(trunk + 2, 70 * KIB),
        "head": drawn(1000 + head, 270 * KIB),
    }


def laid_out(name: str, own: Weights) -> Manifest:
    uses = [WeightUse(n, tensor, (k,)) for k, (n, tensor) in enumerate(own.items()) if n != "table"]
    return lay_out(name, uses, {"table": own["table"]})


def write(cache: Path, name: str, own: Weights) -> Path:
    path = cache / name / "weights-0.bin"
    weights.write(path, laid_out(name, own), own, {"table": own["table"]})
    return path


def contents(store: Store, manifest: Manifest) -> list[bytes]:
    """What a store has of each segment and each table."""
    found = []
    with CpuArena(max(s.nbytes for s in manifest.segments)) as arena:
        for index, segment in enumerate(manifest.segments):
            destination = arena.bytes(0, segment.nbytes)
            store.copy(index, destination)()
            found.append(bytes(destination)[: segment.pieces[0].nbytes])
    return found + [bytes(store.table(table.name).numpy()) for table in manifest.tables]


def require_own(path: Path, name: str, own: Weights, kind: StoreKind = "ram") -> None:
    manifest = laid_out(name, own)
    assert weights.read(path) == manifest
    store = open_store(kind, path, manifest)
    assert contents(store, manifest) == [bytes(own[n].numpy()) for n in ("first", "second", "head", "table")]
    store.close()


def bytes_on_disk(cache: Path) -> int:
    found = {path.stat().st_ino: path.stat().st_size for path in cache.rglob("*.bin")}
    return sum(found.values())


def used_in_memory() -> int:
    gc.collect()
    return HELD.nbytes


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_a_further_model_of_a_family_costs_its_head(kind: StoreKind, tmp_path: Path) -> None:
    first, before = write(tmp_path, "a", member(0)), used_in_memory()
    whole, head = bytes_on_disk(tmp_path), 272 * KIB
    paths = {f"b{n}": write(tmp_path, f"b{n}", member(n)) for n in range(1, 4)}
    assert bytes_on_disk(tmp_path) == whole + 3 * head
    stores = [open_store(kind, path, laid_out(name, member(0))) for name, path in (("a", first), *paths.items())]
    if kind == "ram":
        stores = [open_store(kind, p, laid_out(n, member(0))) for n, p in (("a", first), *paths.items())] + stores
        assert used_in_memory() - before == whole + 3 * head
    for n, (name, path) in enumerate(paths.items(), 1):
        require_own(path, name, member(n), kind)
    for store in stores:
        store.close()
    assert used_in_memory() == before


def test_pages_are_released_with_the_last_model_that_has_the_piece(tmp_path: Path) -> None:
    one, other = write(tmp_path, "a", member(0)), write(tmp_path, "b", member(1))
    before = used_in_memory()
    first = open_store("ram", one, laid_out("a", member(0)))
    second = open_store("ram", other, laid_out("b", member(1)))
    both = used_in_memory()
    first.close()
    first.close()
    assert both - used_in_memory() == 272 * KIB, "the head of the first"
    assert contents(second, laid_out("b", member(1)))[0] == bytes(member(1)["first"].numpy())
    second.close()
    assert used_in_memory() == before


def test_a_model_of_a_family_opens_two_files(tmp_path: Path) -> None:
    write(tmp_path, "a", member(0))
    path = write(tmp_path, "b", member(1))
    before = set(os.listdir("/proc/self/fd"))
    store = open_store("file", path, laid_out("b", member(1)))
    assert isinstance(store, FileStore)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2
    store.close()


def test_a_model_outlives_the_one_whose_weights_it_shares(tmp_path: Path) -> None:
    write(tmp_path, "a", member(0))
    path = write(tmp_path, "b", member(1))
    store = open_store("file", path, laid_out("b", member(1)))
    shutil.rmtree(tmp_path / "a")
    require_own(path, "b", member(1))
    assert weights.sweep(tmp_path) == 272 * KIB, "the head of the removed model"
    require_own(path, "b", member(1))
    assert contents(store, laid_out("b", member(1)))[1] == bytes(member(1)["second"].numpy())
    store.close()
    require_own(write(tmp_path, "c", member(2)), "c", member(2))
    assert bytes_on_disk(tmp_path) == (264 + 300 + 72 + 272 + 272 - 4) * KIB
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "c")
    weights.sweep(tmp_path)
    assert list((tmp_path / pieces.FOLDER).iterdir()) == []


def test_a_damaged_piece_is_not_shared(tmp_path: Path) -> None:
    damaged = write(tmp_path, "a", member(0))
    with damaged.open("r+b") as file:
        file.write(b"x")
    path = write(tmp_path, "b", member(1))
    assert weights.read(damaged) is None
    require_own(path, "b", member(1))
    require_own(write(tmp_path, "a", member(0)), "a", member(0))


def test_equal_digests_of_other_bytes_are_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two pieces of all models collided: what is shared is decided by the bytes."""
    same = hashlib.blake2b(b"", digest_size=32)
    monkeypatch.setattr(
        weights.hashlib,
        "blake2b",
        lambda **_: type(
            "Same", (), {"update": lambda self, block: None, "hexdigest": lambda self: same.hexdigest()}
        )(),
    )
    made = [(f"m{n}", member(n, trunk=10 * n)) for n in range(3)]
    paths = [write(tmp_path, name, own) for name, own in made]
    stores = [open_store("ram", path, laid_out(*one)) for path, one in zip(paths, made, strict=True)]
    for store, path, (name, own) in zip(stores, paths, made, strict=True):
        assert contents(store, laid_out(name, own)) == [
            bytes(own[n].numpy()) for n in ("first", "second", "head", "table")
        ]
        require_own(path, name, own, "file")
    for store in stores:
        store.close()


def test_models_written_at_the_same_time_share_their_weights(tmp_path: Path) -> None:
    alone = write(tmp_path / "alone", "m", member(0))
    with ThreadPoolExecutor(4) as threads:
        paths = list(threads.map(lambda n: write(tmp_path / "cache", f"m{n}", member(n)), range(8)))
    assert bytes_on_disk(tmp_path / "cache") == alone.stat().st_size + 7 * 272 * KIB
    for n, path in enumerate(paths):
        require_own(path, f"m{n}", member(n))


CALLS = ((os, "replace"), (os, "link"), (Path, "touch"), (os, "fsync"), (os, "unlink"), (Path, "unlink"))


def killed_at(call: int, act: Callable[[], object]) -> bool:
    """Run an act in a process that is killed before its n-th change of a folder. Returns whether it ended by itself."""
    process = os.fork()
    if process == 0:
        count = 0

        def counted(original: Callable[..., object], *args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                os._exit(9)
            return original(*args, **kwargs)

        for owner, name in CALLS:
            original = getattr(owner, name)
            patched = partial(counted, original)
            setattr(owner, name, (lambda self, _p=patched, **k: _p(self, **k)) if owner is Path else patched)
        try:
            act()
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_loses_no_named_piece_and_leaves_none_for_ever(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    possible = {f"m{n}": member(n % 3, trunk=100 * (n % 2)) for n in range(6)}
    owned: dict[str, Weights] = {}
    for _ in range(14):
        name, call = rng.choice(list(possible)), rng.randrange(16)
        match rng.choice(["write", "write", "write", "remove", "sweep"]):
            case "write":
                if killed_at(call, partial(write, tmp_path, name, possible[name])):
                    owned[name] = possible[name]
            case "remove":
                shutil.rmtree(tmp_path / name, ignore_errors=True)
                owned.pop(name, None)
            case "sweep":
                killed_at(call, partial(weights.sweep, tmp_path))
        for known, own in owned.items():
            require_own(tmp_path / known / "weights-0.bin", known, own)
    for folder in tmp_path.iterdir():
        if folder.name not in owned and folder.name != pieces.FOLDER:
            shutil.rmtree(folder)
    for folder in owned:
        write(tmp_path, folder, owned[folder])  # a write removes what a killed one left in its folder
    weights.sweep(tmp_path)
    named = {
        path.stat().st_ino for folder in owned for path in weights.files_of(tmp_path / folder / "weights-0.bin")
    }
    assert {path.stat().st_ino for path in tmp_path.rglob("*.bin")} <= named


class Family(torch.nn.Module):
    """A classifier on a trunk that others have, too."""

    def __init__(self, head: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(2000, 128)
        self.trunk = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        torch.manual_seed(head)
        self.head = torch.nn.Linear(512, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.embed(x).mean(1)))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Sequence[tuple[Lowered, Lowered]]:
    """Two members, lowered in one cache, and each in a cache of its own."""
    folder, found = tmp_path_factory.mktemp("family"), []
    for n in (1, 2):
        path = folder / f"{n}.pt2"
        models.export(Family(n).eval(), {"x": torch.zeros(2, 7, dtype=torch.int64)}, path)
        caches = folder / "shared", folder / f"own{n}"
        found.append(tuple(lower(path, f"m{n}", [1, 2], cache) for cache in caches))
    return found


def test_lowered_models_of_a_family_have_the_weights_that_each_has_alone(
    family: Sequence[tuple[Lowered, Lowered]],
) -> None:
    for shared, alone in family:
        assert shared.manifest == alone.manifest
        stores = [open_store("ram", one.weights_path, one.manifest) for one in (shared, alone)]
        for index, segment in enumerate(shared.manifest.segments):
            found = [np.empty(segment.nbytes, np.uint8) for _ in stores]
            for store, destination in zip(stores, found, strict=True):
                store.copy(index, destination)()
            assert np.array_equal(*found)
        for store in stores:
            store.close()


def test_models_that_differ_in_their_values_only_have_the_same_graphs(
    family: Sequence[tuple[Lowered, Lowered]],
) -> None:
    """Profiles and plans are cached by the graph's fingerprint: a further member needs none of its own."""
    (one, _), (other, _) = family
    assert one.archive != other.archive
    assert one.manifest.fingerprint != other.manifest.fingerprint
    for bucket, graph in one.graphs.items():
        assert graph.fingerprint == other.graphs[bucket].fingerprint


def of_16_bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().to(weight.dtype)


VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other": torch.Tensor.neg,
    "16 bits": of_16_bits,
    "zero": torch.zeros_like,
    "equal": torch.ones_like,
}
"""What a member of a family may have made of the first one's weights."""


PACKED, INT8 = Options(packed=True), Options(packed=True, weights="int8")
QUICK = (("conv_norm", PACKED), ("tied", INT8))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=() if (name, options) in QUICK else pytest.mark.slow)
        for name in models.CASES
        for options in (PACKED, INT8)
    ],
)
def test_a_further_member_is_lowered_as_it_would_be_alone(
    name: str, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = models.export(models.made(name), models.CASES[name][1], tmp_path / "first.pt2")
    lower(tmp_path / "first.pt2", name, [2, 4], tmp_path / "family", options=options)
    first = {key: tensor.detach().clone() for key, tensor in program.state_dict.items()}
    for kind, change in VALUES.items():
        with torch.no_grad():
            for key, tensor in program.state_dict.items():
                tensor.copy_(change(first[key]) if tensor.is_floating_point() else first[key])
        path, said = tmp_path / f"{kind}.pt2", list[str]()
        torch.export.save(program, path)
        member = lower(path, name, [2, 4], tmp_path / "family", said.append, options)
        if kind == "other":
            assert not any("tracing" in text for text in said), "its program is traced once"
        with monkeypatch.context() as patched:
            patched.setattr(archive, "_last", None)
            patched.setattr(lowering, "_last", None)
            alone = lower(path, name, [2, 4], tmp_path / "alone", options=options)
        assert described(member) == described(alone)


def described(lowered: Lowered) -> list[object]:
    """The program of a lowered model, and the digests of its weights."""
    (program,) = lowered.weights_path.parent.glob("program-*.json")
    ranges = weights.stored_ranges(lowered.weights_path, lowered.manifest)
    return [lowered.manifest, program.read_bytes(), [one.digest for one in ranges]]

"""Archives that attack: operators that reach outside of computing, in every sub-graph, and records that explode."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cohabit.planner.errors import FormatError
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.errors import ArchiveError, UnsupportedModel
from cohabit.runtime.lowering import archive, archive_file, artifact
from cohabit.runtime.lowering.allowed_ops import allows, allows_lowered, allows_target
from cohabit.runtime.lowering.archive_file import ArchiveFile, fingerprint
from cohabit.runtime.lowering.lower import Lowered, folders_of, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.stores.host import open_store
from tests.runtime.test_archive import read
from tests.support.runtime import models


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(n: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return n + 1, y * 0.5

        _, y = torch.while_loop(lambda n, y: n < 3, body, (torch.zeros((), dtype=torch.int64), x))
        return y


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu()


class NoGrad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.sin()
        return y + x


def exported(model: nn.Module, folder: Path) -> Path:
    path = folder / "1" / "model.pt2"
    models.export(model, {"x": torch.ones(2, 8)}, path, dynamic=False)
    return path


@pytest.fixture(scope="module")
def branch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with sub-graphs."""
    return exported(models.Branch(), tmp_path_factory.mktemp("branch"))


def nodes_of(document: Any) -> Iterator[dict[str, Any]]:
    """Every call of a serialized program, those of sub-graphs too."""
    if isinstance(document, list):
        for item in document:
            yield from nodes_of(item)
    elif isinstance(document, dict):
        if "target" in document and "inputs" in document and "outputs" in document:
            yield document
        for item in document.values():
            yield from nodes_of(item)


def edited(path: Path, edit: Callable[[Any], None]) -> Path:
    """A copy of an archive with another program."""
    hostile = path.with_name("hostile.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(hostile, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("models/model.json"):
                document = json.loads(data)
                edit(document)
                data = json.dumps(document).encode()
            new.writestr(name, data)
    return hostile


def attacked(path: Path, victim: str, target: str, inputs: list[dict[str, Any]]) -> Path:
    """Replace the first call of one operator, wherever it is, by another call."""

    def replace(document: Any) -> None:
        node = next(n for n in nodes_of(document) if n["target"] == f"torch.ops.aten.{victim}")
        node["target"], node["inputs"] = target, inputs

    return edited(path, replace)


def from_file(secret: Path) -> list[dict[str, Any]]:
    return [
        {"name": "filename", "arg": {"as_string": str(secret)}, "kind": 1},
        {"name": "shared", "arg": {"as_bool": False}, "kind": 1},
        {"name": "size", "arg": {"as_int": 16}, "kind": 1},
    ]


@pytest.mark.parametrize(
    ("model", "victim"),
    [(models.Branch, "linear.default"), (Loop, "mul.Tensor"), (NoGrad, "sin.default"), (Plain, "relu.default")],
)
def test_no_graph_of_an_archive_reads_a_file(tmp_path: Path, model: type[nn.Module], victim: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    path = attacked(exported(model(), tmp_path), victim, "torch.ops.aten.from_file.default", from_file(secret))
    with pytest.raises(UnsupportedModel, match=r"aten\.from_file\.default.*not an operator that a model may use"):
        lower(path, "hostile", [1], tmp_path / "cache")


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten._print.default",
        "torch.ops.aten.save.default",
        "torch.ops.aten.set_.source_Storage",
        "torch.ops.aten.resize_.default",
        "torch.ops.aten.fbgemm_linear_fp16_weight.default",
        "torch.ops.aten._sparse_coo_tensor_unsafe.default",
        "torch.ops.aten.add.__class__",
        "torch.ops.mkldnn._linear_pointwise.default",
        "torch.ops.prim.device.default",
        "torch.ops.c10d.send.default",
        "torch.ops.symm_mem.symm_mem_copy_.default",
        "torch.ops.load_library",
        "torch.ops.higher_order.print",
        "torch.ops.higher_order.call_torchbind",
        "torch.hub.load",
        "torch.load",
        "_operator.methodcaller",
        "math.__loader__.x",
        "#extension:f",
        "print",
    ],
)
def test_other_targets_of_an_archive_are_refused(branch: Path, target: str) -> None:
    path = attacked(branch, "linear.default", target, [])
    with pytest.raises(UnsupportedModel, match="not an operator that a model may use"):
        read(path)


def test_names_are_not_written_into_code(branch: Path, tmp_path: Path) -> None:
    """Torch generates Python from a graph: the name of a branch's input would be a default value that is evaluated."""
    mark = tmp_path / "mark"

    def poison(document: Any) -> None:
        node = next(n for n in nodes_of(document) if n["target"].endswith("cond"))
        graph = next(i["arg"]["as_graph"]["graph"] for i in node["inputs"] if "as_graph" in i["arg"])
        old = json.dumps(graph["inputs"][-1]["as_tensor"]["name"])
        new = json.dumps(f"z=open({str(mark)!r}, 'w')")
        replaced = json.loads(json.dumps(graph).replace(old, new))
        graph.update(replaced)

    with pytest.raises(ArchiveError, match="is not an identifier"):
        lower(edited(branch, poison), "hostile", [1], tmp_path / "cache")
    assert not mark.exists()


def test_containers_import_no_module(tmp_path: Path) -> None:
    """Torch imports the module of an enum, or of a defaultdict's factory, that a container's structure names."""
    (tmp_path / "hostile_module.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")

    def poison(document: Any, written: str) -> None:
        (call,) = (c for c in document["graph_module"]["module_call_graph"] if c["fqn"] == "")
        spec = json.loads(call["signature"]["in_spec"])
        spec[1]["context"] = json.dumps({"__enum__": True, "fqn": "hostile_module:A", "name": "b"})
        text = json.dumps(spec)
        call["signature"]["in_spec"] = text.replace("_enum", f"{written}enum")

    script = f"""
import sys
from pathlib import Path
from cohabit.runtime.errors import ArchiveError
from tests.runtime.test_archive import read
sys.path.insert(0, {str(tmp_path)!r})
for path in sys.argv[1:]:
    try:
        read(Path(path))
    except ArchiveError as error:
        print(error)
"""
    paths = []
    for name, written in {"plain": "_", "escaped": r"\u005f", "escaped twice": r"\\u005f"}.items():
        (tmp_path / name).mkdir()
        paths.append(edited(exported(Plain(), tmp_path / name), partial(poison, written=written)))
    command = [sys.executable, "-c", script, *map(str, paths)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.count("use plain containers") == len(paths), ended.stderr
    assert not (tmp_path / "mark").exists()


def test_functions_are_no_arguments(branch: Path) -> None:
    def poison(document: Any) -> None:
        node = next(n for n in nodes_of(document) if n["target"].endswith("cond"))
        next(i for i in node["inputs"] if "as_graph" in i["arg"])["arg"] = {"as_operator": "torch.load"}

    with pytest.raises(UnsupportedModel, match=r"'torch\.load'"):
        read(edited(branch, poison))


def test_every_operator_with_a_string_that_is_no_choice_is_refused() -> None:
    """Independent of the names in the list: whatever torch offers, no op that is allowed takes a path."""
    admitted = set()
    for schema in torch._C._jit_get_all_schemas():
        name, overload = schema.name.replace("::", "."), schema.overload_name or "default"
        if allows_target(f"torch.ops.{name}.{overload}"):
            admitted |= {a.name for a in schema.arguments if "str" in str(a.type)}
            assert schema.name.startswith("aten::")
    assert admitted
    assert not {name for name in admitted if "file" in name or "path" in name or "name" in name}


def test_what_networks_are_made_of_is_allowed() -> None:
    aten = torch.ops.aten
    usual = [aten.linear.default, aten.conv2d.padding, aten.lstm.input, aten.gelu.default, aten.einsum.default]
    usual += [
        aten.scaled_dot_product_attention.default,
        aten._to_copy.default,
        aten.index.Tensor,
        aten.div.Tensor_mode,
    ]
    assert all(map(allows, usual))
    own = torch.ops.mkldnn._linear_pointwise.default
    assert allows_lowered(own)
    assert not allows(own)


def test_a_cached_program_is_held_to_the_same_operators(tmp_path: Path) -> None:
    lowered = lower(exported(Plain(), tmp_path), "m", [1], tmp_path / "cache")
    traces = artifact.encode_traces(lowered.traces)
    program = artifact.LoweredProgram("x", "a manifest", lowered.inputs, lowered.outputs, lowered.batched, traces)
    raw = artifact.encode(program)
    assert artifact.decode(raw, "x")[0].weights == "a manifest"
    with pytest.raises(FormatError, match="not an operator that a model may use"):
        artifact.decode(raw.replace(b"aten.relu_.default", b"aten.from_file.default"), "x")


def test_a_record_that_inflates_is_refused(tmp_path: Path) -> None:
    path = exported(Plain(), tmp_path)
    bomb = tmp_path / "bomb.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(8 << 20) if name.endswith("weight_0") else old.read(name))
    assert bomb.stat().st_size < 64 << 10
    with pytest.raises(ArchiveError, match=r"is compressed, to \d+ of \d+ bytes"):
        read(bomb)


def test_a_list_of_too_many_records_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "many.pt2"
    with zipfile.ZipFile(path, "w") as file:
        for n in range(45_000):
            file.writestr(zipfile.ZipInfo(f"{n:060}"), b"")
    with pytest.raises(ArchiveError, match=r"its list of records has \d+ bytes, the limit is 4194304"):
        fingerprint(path)


@pytest.mark.parametrize("model", [models.Branch, Loop, NoGrad])
def test_a_restart_reads_no_archive(
    tmp_path: Path, model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Archives are read where models are prepared; programs with sub-programs are in the cache as well."""
    path = exported(model(), tmp_path)
    first = lower(path, "m", [1], tmp_path / "cache")
    monkeypatch.setattr(archive, "read", lambda file: pytest.fail("the archive was read again"))
    again = lower(path, "m", [1], tmp_path / "cache")
    x = torch.randn(2, 8)
    assert torch.equal(run(again, x), run(first, x))


class Flat(nn.Module):
    """One layer whose weights are one record."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def with_the_checksums_of(weights: torch.Tensor, wanted: int) -> torch.Tensor:
    """Flip the lowest bits of some weights, so that the CRC-32 of all of them is another one's: it is linear."""
    raw = weights.numpy().copy()
    base = zlib.crc32(raw.tobytes())
    basis: dict[int, tuple[int, frozenset[int]]] = {}
    for n in range(raw.size):
        flipped = raw.copy()
        flipped.view("<i4").flat[n] ^= 1
        value, flips = reduced(zlib.crc32(flipped.tobytes()) ^ base, frozenset({n}), basis)
        if value:
            basis[value.bit_length()] = value, flips
    left, chosen = reduced(base ^ wanted, frozenset(), basis)
    assert left == 0
    for n in chosen:
        raw.view("<i4").flat[n] ^= 1
    return torch.from_numpy(raw)


def reduced(
    value: int, flips: frozenset[int], basis: dict[int, tuple[int, frozenset[int]]]
) -> tuple[int, frozenset[int]]:
    while value and (found := basis.get(value.bit_length())) is not None:
        value, flips = value ^ found[0], flips ^ found[1]
    return value, flips


def with_equal_checksums(folder: Path) -> tuple[Path, Path]:
    """Two archives with other weights, whose lists of records are the same."""
    first, second = Flat(), Flat()
    raw = first.a.weight.detach().numpy().tobytes()
    with torch.no_grad():
        second.a.weight.copy_(with_the_checksums_of(second.a.weight.detach(), zlib.crc32(raw)))
    paths = exported(first, folder / "first"), exported(second, folder / "second")
    records = [[(i.filename, i.file_size, i.CRC) for i in zipfile.ZipFile(path).infolist()] for path in paths]
    assert records[0] == records[1]
    return paths


def test_archives_with_the_same_checksums_are_two_models(tmp_path: Path) -> None:
    x, paths = torch.randn(2, 8), with_equal_checksums(tmp_path)
    answers = [run(lower(path, "m", [1], tmp_path / "cache"), x) for path in paths]
    alone = [run(lower(path, "m", [1], tmp_path / f"cache{n}"), x) for n, path in enumerate(paths)]
    assert not torch.equal(*alone)
    assert all(map(torch.equal, answers, alone))


@pytest.mark.parametrize("exchanged", ["", "weights.*", "program-*.json"], ids=["folder", "weights", "program"])
def test_what_the_cache_has_of_another_model_is_made_anew(tmp_path: Path, exchanged: str) -> None:
    """Sound files at the place of other ones, as after a restored backup, or a copy that went wrong."""
    x, cache = torch.randn(2, 8), tmp_path / "cache"
    paths = exported(Plain(), tmp_path / "first"), exported(NoGrad(), tmp_path / "second")
    lowered = [lower(path, "m", [1], cache) for path in paths]
    answers = [run(each, x) for each in lowered]
    one, other = (each.weights_path.parent for each in lowered)
    pairs = (
        zip(sorted(one.glob(exchanged)), sorted(other.glob(exchanged)), strict=True)
        if exchanged
        else [(one, other)]
    )
    for a, b in pairs:
        exchange(a, b)
    again = [run(lower(path, "m", [1], cache), x) for path in paths]
    assert all(map(torch.equal, again, answers))


def exchange(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def test_an_archive_is_read_again_when_it_was_replaced_or_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same size, list of records, name and time; a time of change cannot be set."""
    monkeypatch.setattr(archive_file, "_SETTLED_NS", 0)
    first, second = with_equal_checksums(tmp_path)
    path = tmp_path / "model.pt2"
    shutil.copy2(first, path)
    x, before = torch.randn(2, 8), path.stat()
    answer, other = (run(lower(each, "m", [1], tmp_path / "cache"), x) for each in (path, second))
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveFile, "fingerprint", None)  # would fail if it were taken again
        assert torch.equal(run(lower(path, "m", [1], tmp_path / "cache"), x), answer)
    path.write_bytes(second.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert torch.equal(run(lower(path, "m", [1], tmp_path / "cache"), x), other)
    shutil.copy2(first, tmp_path / "new")
    os.utime(tmp_path / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "new").rename(path)
    assert torch.equal(run(lower(path, "m", [1], tmp_path / "cache"), x), answer)


def test_no_note_is_taken_of_a_file_that_has_just_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change again before the clock of its file system goes on."""
    monkeypatch.setattr(archive_file, "_SETTLED_NS", 3600 * 10**9)
    path = exported(Flat(), tmp_path)
    with ArchiveFile(path) as file:
        file.note(tmp_path)
        assert file.noted(tmp_path) is None


def test_what_is_written_to_the_cache_goes_by_the_bytes_and_not_by_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes an archive without a trace in its times has no part of another model's cache."""
    monkeypatch.setattr(archive_file, "_SETTLED_NS", 0)
    first, second = with_equal_checksums(tmp_path)
    with ArchiveFile(first) as file:
        file.note(tmp_path / "cache" / "archives")
    with first.open("rb") as opened:
        state = archive_file._FileState.of(opened.fileno())
    first.write_bytes(second.read_bytes())
    monkeypatch.setattr(archive_file._FileState, "of", lambda fd: state)
    lowered = lower(first, "m", [1], tmp_path / "cache")
    assert lowered.archive == fingerprint(second)
    assert list(folders_of(tmp_path / "cache").values()) == [lowered.archive[:32]]


def test_an_archive_that_is_written_while_it_is_lowered_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = with_equal_checksums(tmp_path)

    def written_meanwhile(file: ArchiveFile) -> Any:
        program = archive_read(file)
        path.write_bytes(other.read_bytes())
        return program

    archive_read = archive.read
    monkeypatch.setattr(archive, "read", written_meanwhile)
    with pytest.raises(ArchiveError, match="it was written while it was read; load the model again"):
        lower(path, "m", [1], tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def run(lowered: Lowered, x: torch.Tensor) -> torch.Tensor:
    arena = CpuArena(2 * lowered.manifest.segment_bytes + (1 << 20))
    store = open_store("ram", lowered.weights_path, lowered.manifest)
    plan = resident_plan(lowered.graphs[min(lowered.graphs)])
    program = build(lowered, plan, None, arena, Bases(0, lowered.manifest.segment_bytes), store)
    with arena, CpuExecutor() as executor:
        executor.load(program)
        return executor.run(program, [x.clone()]).outputs[0]

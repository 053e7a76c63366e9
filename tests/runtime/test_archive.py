"""Archives from strangers: damaged, pickled or hostile ones are refused with a reason, and nothing of them runs."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cohabit.runtime.errors import ArchiveError
from cohabit.runtime.lowering import archive
from cohabit.runtime.lowering.archive_file import ArchiveFile, fingerprint
from tests.support.runtime import models


def read(path: Path) -> tuple[torch.export.ExportedProgram, list[str]]:
    with ArchiveFile(path) as file:
        return archive.read(file)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archives") / "good.pt2"
    models.export(models.Wide(2, 64), {"x": torch.zeros(3, 64)}, path)
    return path


def rewritten(
    source: Path, change: Callable[[str, bytes], bytes | None], extra: dict[str, bytes] | None = None
) -> Path:
    """A copy of an archive with records changed, left out (None) or added."""
    target = source.with_name("changed.pt2")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].split("/", 1)[0]
        for name in old.namelist():
            data = change(name.split("/", 1)[1], old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in (extra or {}).items():
            new.writestr(f"{root}/{name}", data)
    return target


def edited(source: Path, record: str, edit: Callable[[dict[str, object]], None]) -> Path:
    def change(name: str, data: bytes) -> bytes:
        if name != record:
            return data
        document = json.loads(data)
        edit(document)
        return json.dumps(document).encode()

    return rewritten(source, change)


def test_weights_are_what_was_saved(tmp_path: Path) -> None:
    model = models.Wide(2, 64)
    models.export(model, {"x": torch.zeros(3, 64)}, tmp_path / "model.pt2")
    loaded = read(tmp_path / "model.pt2")[0].state_dict
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[k], v) for k, v in model.state_dict().items())


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.pt2" for n in range(3)]
    for seed, path in zip((0, 0, 1), paths, strict=True):
        torch.manual_seed(seed)
        models.export(models.Wide(1, 8), {"x": torch.zeros(3, 8)}, path)
    weights = [read(p)[0].state_dict["layers.0.weight"] for p in paths]
    assert torch.equal(weights[0], weights[1])
    assert fingerprint(paths[0]) != fingerprint(paths[2])


@pytest.mark.parametrize("keep", [0, 10, 1000, -100])
def test_a_truncated_archive_is_refused(good: Path, keep: int) -> None:
    cut = good.with_name("cut.pt2")
    cut.write_bytes(good.read_bytes()[:keep])
    with pytest.raises(ArchiveError, match="truncated"):
        read(cut)


def test_a_flipped_bit_in_a_weight_is_found(good: Path) -> None:
    with zipfile.ZipFile(good) as file:
        info = next(i for i in file.infolist() if i.filename.endswith("weights/weight_0"))
    damaged = good.with_name("damaged.pt2")
    shutil.copy(good, damaged)
    with damaged.open("r+b") as raw:
        raw.seek(info.header_offset + 2000)
        byte = raw.read(1)
        raw.seek(info.header_offset + 2000)
        raw.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ArchiveError, match="weight_0 is damaged"):
        read(damaged)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_files_of_other_kinds_are_called_by_them(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 2)
    torch.jit.save(torch.jit.trace(layer, torch.zeros(1, 4)), tmp_path / "script.pt")
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    torch.save(layer.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(layer.state_dict(), tmp_path / "state.safetensors")
    for name, kind in (
        ("script.pt", "is a TorchScript file"),
        ("state.pt", "is a state_dict or another pickle"),
        ("old.pt", "is a state_dict or another pickle"),
        ("state.safetensors", "is a safetensors file"),
    ):
        with pytest.raises(ArchiveError, match=f"{name} {kind}"):
            read(tmp_path / name)


def test_pickled_weights_are_refused(good: Path) -> None:
    def pickled(document: dict[str, object]) -> None:
        config = document["config"]
        assert isinstance(config, dict)
        next(iter(config.values()))["use_pickle"] = True

    with pytest.raises(ArchiveError, match="pickle"):
        read(edited(good, "data/weights/model_weights_config.json", pickled))


def test_a_legacy_pickle_of_all_weights_is_refused(good: Path) -> None:
    with pytest.raises(ArchiveError, match="pickle"):
        read(rewritten(good, lambda name, data: data, {"data/weights/model.pt": b"\x80\x02."}))


def test_a_compiled_library_is_refused(good: Path) -> None:
    with pytest.raises(ArchiveError, match="compiled library"):
        read(rewritten(good, lambda name, data: data, {"data/aotinductor/model/a.so": b"ELF"}))


def test_sample_inputs_are_never_unpickled(good: Path) -> None:
    bomb = b"cos\nsystem\n(S'touch " + str(good.with_name("pwned")).encode() + b"'\ntR."
    path = rewritten(good, lambda name, data: bomb if name.startswith("data/sample_inputs/") else data)
    read(path)
    assert not good.with_name("pwned").exists()


def replace_everywhere(document: object, key: str, value: str) -> int:
    """Replace every string under a key; returns how many."""
    count = 0
    if isinstance(document, dict):
        for name, item in document.items():
            if name == key and isinstance(item, str):
                document[name] = value
                count += 1
            else:
                count += replace_everywhere(item, key, value)
    elif isinstance(document, list):
        count = sum(replace_everywhere(item, key, value) for item in document)
    return count


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch pwned')",
        "(lambda: 1)()",
        "Symbol('s0').__class__",
        "exec('1')",
        "Symbol('os')",
    ],
)
def test_shape_expressions_are_not_evaluated(good: Path, expression: str) -> None:
    def poison(document: dict[str, object]) -> None:
        assert replace_everywhere(document, "expr_str", expression) > 0

    with pytest.raises(ArchiveError, match="shape expression"):
        read(edited(good, "models/model.json", poison))


@pytest.mark.parametrize(
    "record", ["models/model.json", "data/weights/model_weights_config.json", "data/weights/weight_1"]
)
def test_a_missing_record_is_named(good: Path, record: str) -> None:
    with pytest.raises(ArchiveError, match=record.replace(".", r"\.")):
        read(rewritten(good, lambda name, data: None if name == record else data))


def test_garbage_for_a_program_is_refused(good: Path) -> None:
    for garbage in (b"", b"{", b"[]", b'{"graph_module": 3}', b"\xff\xfe"):
        path = rewritten(good, lambda name, data, g=garbage: g if name == "models/model.json" else data)
        with pytest.raises(ArchiveError):
            read(path)


def test_a_weight_that_does_not_fit_its_record_is_refused(good: Path) -> None:
    def enlarge(document: dict[str, object]) -> None:
        config = document["config"]
        assert isinstance(config, dict)
        next(iter(config.values()))["tensor_meta"]["sizes"][0]["as_int"] = 1 << 40

    with pytest.raises(ArchiveError, match="does not fit"):
        read(edited(good, "data/weights/model_weights_config.json", enlarge))


def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt2")  # to open it would wait for a writer
    with pytest.raises(ArchiveError, match="it is not a regular file"):
        ArchiveFile(tmp_path / "model.pt2")

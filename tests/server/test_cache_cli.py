"""`cohabit cache` as a user meets it: what it lists, what it removes, and what a server then still does."""

import ast
import io
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from cohabit import loadgen, server
from cohabit.planner import cache_file
from cohabit.planner.library import Library
from cohabit.planner.plan import encode
from cohabit.planner.profile import Link, Profile
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.planner.sizing.shares import Point
from cohabit.runtime.cuda.profiling.measure import Measurement
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.lowering.weights import files_of, manifest_of, read
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from cohabit.runtime.pieces import FOLDER
from cohabit.runtime.stores.host import FileStore
from cohabit.runtime.stores.pages import anonymous_memory
from cohabit.server.cli import main
from cohabit.server.format import make_table, print_table
from tests.support.runtime import models

pytestmark = pytest.mark.process


def make_repository(folder: Path) -> Path:
    """Make two models of different widths, which the cache beside them has, lowered and measured."""
    for name, width in (("wide", 264), ("narrow", 24)):
        path = folder / "models" / name / "1" / "model.pt2"
        models.export(models.Wide(2, width), {"x": torch.zeros(3, width)}, path)
        while time.time_ns() < path.stat().st_ctime_ns + 200_000_000:
            time.sleep(0.01)  # an archive is noted once its time of change is old enough to tell versions apart
        assert main(["profile", str(path), "--threads", "1", "--cache", str(folder / "cache")]) == 0
    return folder / "models"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository and its cache, which tests leave as they are."""
    return make_repository(tmp_path_factory.mktemp("cache_cli"))


@pytest.fixture
def own_repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


def cache(repository: Path, *arguments: str) -> int:
    return main(["cache", *arguments, "--cache", str(repository.parent / "cache")])


def files(repository: Path, pattern: str) -> list[Path]:
    return sorted(path for path in (repository.parent / "cache").rglob(pattern) if path.is_file())


def rows(shown: str, names: Sequence[str] = ("wide", "narrow")) -> dict[str, list[str]]:
    found = [line.split() for line in shown.splitlines()]
    return {row[0]: row for row in found if row and row[0] in names}


def test_the_list_has_each_model_its_bytes_and_the_total(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cache(repository, "ls") == 0
    shown = capsys.readouterr().out
    listed = rows(shown)
    assert set(listed) == {"wide", "narrow"}
    for row in listed.values():
        assert row[4:6] == ["1", "0"], "profiles and plans"
    assert re.search(r"^\S+cache: [0-9.]+ \w+ in all$", shown, re.MULTILINE), (
        "in one line, however narrow the table"
    )


def test_titles_and_totals_are_lines_beside_tables_not_parts_of_them() -> None:
    """As parts of a table they wrap at its width, which depends on what it holds."""
    console = Console(width=200, record=True, file=io.StringIO())
    title, total = "a title of several words " * 20, "a total of several words " * 20
    print_table(console, make_table("a", "b"), title=title, total=total)
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert {title.strip(), total.strip()} <= set(lines)
    for path in (*Path(server.__path__[0]).rglob("*.py"), *Path(loadgen.__path__[0]).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("Table", "make_table")):
                assert not {"title", "caption"} & {keyword.arg for keyword in call.keywords}, path


def test_nothing_is_removed_without_a_confirmation(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(repository, "*")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert cache(repository, "rm", "--all") == 1
    said = capsys.readouterr()
    assert f"to be removed: {len([p for p in before if 'compiled' not in p.parts])} files" in said.out
    assert "--yes" in said.err
    assert files(repository, "*") == before


def test_what_a_repository_does_not_use_is_removed_and_the_rest_stays(repository: Path) -> None:
    kept = {path: path.read_bytes() for path in files(repository, "*")}
    models.export(models.Wide(3, 40), {"x": torch.zeros(3, 40)}, repository.parent / "gone" / "1" / "model.pt2")
    gone = str(repository.parent / "gone")
    assert main(["profile", gone, "--threads", "1", "--cache", str(repository.parent / "cache")]) == 0
    assert len(files(repository, "*")) > len(kept)
    assert cache(repository, "rm", "--unused-by", str(repository), "--yes") == 0
    assert {path: path.read_bytes() for path in files(repository, "*")} == kept


def test_an_archive_that_cannot_be_read_keeps_what_was_made_of_it(
    own_repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = own_repository
    before = files(repository, "*")
    (repository / "wide" / "1" / "model.pt2").write_bytes(b"half an upload")
    assert cache(repository, "rm", "--unused-by", str(repository), "--yes") == 0
    assert "not a .pt2 archive" in capsys.readouterr().err
    assert files(repository, "*") == before


def test_nothing_is_removed_where_an_archive_s_use_of_the_cache_is_not_known(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(repository, "*")
    new = repository / "new" / "1" / "model.pt2"
    new.parent.mkdir(parents=True)
    new.write_bytes(b"half an upload")
    assert cache(repository, "rm", "--unused-by", str(repository), "--yes") == 2
    shutil.rmtree(repository / "new")
    assert "and nothing was removed" in capsys.readouterr().err
    assert files(repository, "*") == before


def test_a_model_is_measured_again_after_its_profiles_are_forgotten(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(repository, "profiles/*")
    assert cache(repository, "remeasure", str(repository / "wide")) == 0
    assert "the next start measures wide" in capsys.readouterr().out
    (kept,) = files(repository, "profiles/*")
    weights = {path: path.stat().st_mtime_ns for path in files(repository, "weights-*.bin")}
    again = ["profile", str(repository / "wide"), "--threads", "1", "--cache", str(repository.parent / "cache")]
    assert main(again) == 0
    assert files(repository, "profiles/*") == before
    assert {path: path.stat().st_mtime_ns for path in files(repository, "weights-*.bin")} == weights
    assert kept in before


def test_a_store_that_a_server_has_open_reads_its_weights_after_the_cache_was_emptied(own_repository: Path) -> None:
    repository = own_repository
    own = repository.parent / "cache" / "plans" / "resnet50-64MiB.json"
    own.parent.mkdir(exist_ok=True)
    own.write_text("{}")
    path = files(repository, "weights-*.bin")[0]
    manifest = manifest_of(path)
    segment = manifest.segments[0]
    expected = path.read_bytes()[segment.offset : segment.offset + segment.nbytes]
    store = FileStore(path, manifest)
    assert cache(repository, "rm", "--all", "--yes") == 0
    left = [path for path in files(repository, "*") if "compiled" not in path.parts]
    assert left == [own], "only what the cache names was removed"
    read = np.frombuffer(anonymous_memory(segment.nbytes), np.uint8)[: segment.nbytes]
    store.copy(0, read)()
    assert read.tobytes() == expected
    spilled = store.spill_buffers([4096])
    assert len(spilled) == 1, "its folder is still there"
    store.close()


def test_what_a_removed_model_shares_with_another_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.Wide(2, 264)
    for name in ("first", "second"):
        with torch.no_grad():
            list(model.parameters())[-1].add_(1)
        models.export(model, {"x": torch.zeros(3, 264)}, tmp_path / "models" / name / "1" / "model.pt2")
        given = [str(tmp_path / "models" / name), "--threads", "1", "--cache", str(tmp_path / "cache")]
        assert main(["profile", *given]) == 0
    repository = tmp_path / "models"
    (profile,) = files(repository, "profiles/*")
    second = max(files(repository, "weights-*.json"), key=lambda path: path.stat().st_mtime_ns).with_suffix(".bin")
    others = {path for path in files_of(second) if path.parent.name == FOLDER}
    assert others, "it shares weights"
    shutil.rmtree(repository / "first")
    capsys.readouterr()
    assert cache(repository, "rm", "--unused-by", str(repository), "--yes") == 0
    assert "removed" in capsys.readouterr().out
    assert files(repository, "profiles/*") == [profile], "both are planned by it"
    assert len(files(repository, "weights-*.json")) == 1
    assert read(second) == manifest_of(second)
    assert not others & set(files_of(second)), "they are in a smaller file"
    assert cache(repository, "rm", "--all", "--yes") == 0
    assert [path for path in files(repository, "*") if "compiled" not in path.parts] == []


def test_a_gpu_s_measurement_and_its_plans_belong_to_the_model_that_was_lowered(
    own_repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A GPU's kernels take scratch that is measured there, so profiles and plans are of another graph than the lowered.
    repository, folder = own_repository, own_repository.parent / "cache"
    weights = folder / "weights"
    lowered = lower(repository / "wide" / "1" / "model.pt2", "wide", [1], weights, options=Options(packed=True))
    (graph,) = lowered.graphs.values()
    link = Link(0.0, 1e9)
    scratched = msgspec.structs.replace(
        graph, ops=tuple(msgspec.structs.replace(op, scratch_bytes=64) for op in graph.ops)
    )
    profile = Profile(scratched.fingerprint, "cuda", (0.1,) * len(graph.ops), link, link)
    measured = Measurement(((),), (profile,), link, ((),), "key", (graph.fingerprint,))
    cache_file.write(folder / "profiles" / f"cuda-{'0' * 32}.json", msgspec.json.encode(measured))
    cache_file.write(folder / "plans" / f"{'0' * 64}.json", encode(resident_plan(scratched)))
    demand = ModelDemand("wide", {Bucket(1): scratched}, {Bucket(1): profile})
    Library(folder).store_ladder(demand, "best", 4096, (Point(4096, 0.1),))
    capsys.readouterr()
    assert cache(repository, "ls") == 0
    listed = rows(capsys.readouterr().out)
    assert listed["wide"][4:6] == ["2", "2"]
    assert listed["narrow"][4:6] == ["1", "0"]
    assert cache(repository, "remeasure", str(repository / "wide")) == 0
    assert files(repository, "cuda-*") == []

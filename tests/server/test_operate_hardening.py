"""A repository is data: whatever lies in it, nothing outside is read, nothing is run, and nothing hangs."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cohabit.runtime.errors import ArchiveError
from cohabit.runtime.lowering.archive import read
from cohabit.runtime.lowering.archive_file import ArchiveFile
from cohabit.server.repository.scan import scan, versions_of
from cohabit.server.repository.sources import ModelSource, Unloadable
from tests.support.server.server_fakes import identity, running, serving
from tests.support.server.server_http import ask

pytestmark = pytest.mark.process

NAMES_THAT_LEAVE = ["..", ".", "../other", "/etc", "a/b", "a\\b", "", "-x", ".hidden", "a\x00b", "a\n", "x" * 256]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.pt2").write_bytes(b"inside")
    secret = tmp_path / "secret"
    (secret / "1").mkdir(parents=True)
    (secret / "1" / "model.pt2").write_bytes(b"outside")
    (secret / "config.pbtxt").write_text("name: 'm'")
    return root


def reason(repository: Path) -> str:
    (model,) = scan(repository)
    assert isinstance(model, Unloadable)
    return model.reason


def replaced(path: Path, target: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            child.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("inside", ["m/1/model.pt2", "m/1", "m/config.pbtxt"])
@pytest.mark.parametrize("relative", [False, True])
def test_links_out_of_the_repository_are_refused(repository: Path, inside: str, relative: bool) -> None:
    target = repository.parent / "secret" / inside.partition("/")[2]
    link = repository / inside
    replaced(link, Path(os.path.relpath(target, link.parent)) if relative else target)
    assert "is a link that leads out of the repository" in reason(repository)


def test_a_model_folder_that_is_a_link_out_is_refused(repository: Path) -> None:
    (repository / "evil").symlink_to(repository.parent / "secret")
    evil, good = scan(repository)
    assert isinstance(evil, Unloadable)
    assert "leads out of the repository" in evil.reason
    assert isinstance(good, ModelSource)


def test_links_within_the_repository_are_followed(repository: Path) -> None:
    (repository / "m" / "2").symlink_to(repository / "m" / "1")
    (repository / "same").symlink_to(repository / "m")
    model, same = scan(repository)
    assert isinstance(same, ModelSource)
    assert isinstance(model, ModelSource)
    assert model.version == 2
    assert model.path.read_bytes() == b"inside"


@pytest.mark.parametrize("inside", ["m/1/model.pt2", "m/config.pbtxt"])
def test_links_that_lead_nowhere_or_in_a_circle_are_refused(repository: Path, inside: str) -> None:
    link = repository / inside
    for target in (repository / "nowhere", link):
        replaced(link, target)
        assert "is a link that leads nowhere" in reason(repository)


@pytest.mark.parametrize("inside", ["m/1/model.pt2", "m/config.pbtxt"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_in_place_of_files_are_refused(
    repository: Path, inside: str, make: Callable[[Path], None]
) -> None:
    (repository / inside).unlink(missing_ok=True)
    make(repository / inside)
    assert reason(repository) == f"{Path(inside).name} is not a regular file"


def test_links_to_devices_are_refused(repository: Path) -> None:
    replaced(repository / "m" / "1" / "model.pt2", Path("/dev/zero"))
    assert "leads out of the repository, to /dev/zero" in reason(repository)


def test_a_config_cannot_name_a_file_elsewhere(repository: Path) -> None:
    for file in ("../../../secret/1/model.pt2", "/etc/passwd", "..", ".", "a/../model.pt2"):
        (repository / "m" / "config.pbtxt").write_text(f"default_model_filename: '{file}'")
        assert "has no file" in reason(repository) or "is not a regular file" in reason(repository), file


def test_names_that_leave_the_repository_name_no_model(repository: Path) -> None:
    assert [name for name in NAMES_THAT_LEAVE if versions_of(repository, name)] == []
    with running(serving(identity("id", "FP32")), repository=repository, model_control="explicit") as own:
        for name in ("..%2Fsecret", "%2e%2e%2fsecret", "..%5Csecret", "%2Fetc", "a%00b"):
            for path in (f"/v2/models/{name}", f"/v2/models/{name}/config"):
                assert ask(own, "GET", path).status == 404
            assert ask(own, "GET", f"/v2/models/{name}/ready").status in (400, 404)


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    raw = pickle.dumps(Payload(mark))
    whole = tmp_path / "whole.pt2"
    whole.write_bytes(raw)
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("packed/archive_format", "pt2")
        archive.writestr("packed/data.pkl", raw)
        archive.writestr("packed/data/weights/model_weights_config.json", b"{}")
        archive.writestr("packed/data/weights/weight_0.pt", raw)
        archive.writestr("packed/models/model.json", io.BytesIO(b"{}").getvalue())
    for path in (whole, packed):
        with pytest.raises(ArchiveError), ArchiveFile(path) as file:
            read(file)
    assert not mark.exists()
    pickle.loads(raw)
    assert mark.exists(), "the payload works, so the test means something"

"""A model repository in Triton's layout: `NAME/VERSION/model.pt2`, and an optional `NAME/config.pbtxt`."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from server.errors import RepositoryError
from server.protocol.config_fields import ignored_fields, refuse_fields
from server.protocol.model_config import ModelConfig, read_config
from server.scheduling.policy import Policy
from server.scheduling.policy_config import policy_of

_log = logging.getLogger("cohabit.models")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_PROGRAM = "model.pt2"
_MOST_LABEL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that may be loaded: its file, and its config.pbtxt if it has one."""

    name: str
    version: int
    path: Path
    config: ModelConfig | None = None
    policy: Policy = field(default_factory=Policy)
    override: bytes | None = None
    """The serialized `config`, if a client sent it to replace config.pbtxt."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of classes by output."""


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A folder that is no valid model, and the reason."""

    name: str
    reason: str


def scan(repository: Path, may_be_empty: bool = False) -> list[ModelSource | Unloadable]:
    """Find the models in a repository, sorted by name. Raises RepositoryError if there are none."""
    try:
        root = repository.resolve(strict=True)
        folders = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    except FileNotFoundError as error:
        raise RepositoryError(f"model repository {repository} does not exist") from error
    except OSError as error:
        raise RepositoryError(f"model repository {repository} cannot be read: {error}") from error
    models = list(_models(folders, root))
    if not models and not may_be_empty:
        raise RepositoryError(f"model repository {repository} is empty; put models there as NAME/1/{_PROGRAM}")
    return models


def find(path: Path) -> ModelSource:
    """Find the one model at a path: its folder, or the program itself. Raises RepositoryError."""
    if path.is_file():
        in_repository = _VERSION.fullmatch(path.parent.name) is not None
        name = path.resolve().parent.parent.name if in_repository else path.stem
        return ModelSource(name, int(path.parent.name) if in_repository else 1, path)
    if not path.is_dir():
        raise RepositoryError(f"model {path} does not exist; give its folder or a .pt2 file")
    folder = path.resolve()
    try:
        return _source(folder, folder.parent)
    except RepositoryError as error:
        models = sorted(child.name for child in folder.iterdir() if any(child.glob(f"*/{_PROGRAM}")))
        if not models:
            raise RepositoryError(f"{path} is no model: {error}") from error
        raise RepositoryError(
            f"{path} is a repository; give one of its models, such as {path / models[0]}"
        ) from error


def source_of(repository: Path, name: str, override: ModelConfig | None = None) -> ModelSource | None:
    """Find one model; None if there is no such folder. `override` replaces its config.pbtxt.

    Raises RepositoryError.
    """
    if not _NAME.fullmatch(name):
        return None
    try:
        root = repository.resolve(strict=True)
        folder = root / name
        return _source(folder, root, override) if folder.is_dir() else None
    except OSError as error:
        raise RepositoryError(f"model '{name}' of {repository} cannot be read: {error}") from error


def warn_of_ignored_config(source: ModelSource, device: str) -> None:
    """Log the fields of a model's configuration that have no effect, with the reasons."""
    ignored = {} if source.config is None else ignored_fields(source.config, device)
    if ignored:
        _log.warning("fields of config.pbtxt have no effect", extra={"fields": {"model": source.name, **ignored}})


def _models(folders: Sequence[Path], root: Path) -> Iterator[ModelSource | Unloadable]:
    for folder in folders:
        try:
            if folder.is_dir() or folder.is_symlink():
                yield _source(folder, root)
        except (RepositoryError, OSError) as error:
            yield Unloadable(os.fsencode(folder.name).decode(errors="backslashreplace"), str(error))


def _source(folder: Path, root: Path, override: ModelConfig | None = None) -> ModelSource:
    if not _NAME.fullmatch(folder.name):
        raise RepositoryError(
            f"model name {folder.name!r} is not usable; take letters, digits, '_', '-' and '.', 255 at most"
        )
    _confine(folder, root)
    versions = sorted(int(v.name) for v in folder.iterdir() if _VERSION.fullmatch(v.name) and v.is_dir())
    config_path = folder / "config.pbtxt"
    config = override
    if override is None and (config_path.exists() or config_path.is_symlink()):
        config = read_config(_regular(_confine(config_path, root)))
    if config is not None and config.name and config.name != folder.name:
        raise RepositoryError(f"config.pbtxt names the model '{config.name}', its folder '{folder.name}'")
    if config is not None:
        refuse_fields(config)
    version = _served_version(versions, config)
    path = folder / str(version) / ((config and config.default_model_filename) or _PROGRAM)
    if path.parent.parent != folder or not (path.exists() or path.is_symlink()):
        raise RepositoryError(f"version {version} has no file {path.name}")
    policy = policy_of(config) if config is not None else Policy()
    sent = None if override is None else bytes(override.SerializeToString())
    labels = {} if config is None else _labels(folder, root, config)
    return ModelSource(folder.name, version, _regular(_confine(path, root)), config, policy, sent, labels)


def _labels(folder: Path, root: Path, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Read the label files of a model's folder, which have a class per line. Raises RepositoryError."""
    labels = {}
    for output in config.output:
        file = Path(output.label_filename)
        if not output.label_filename:
            continue
        if file.is_absolute() or ".." in file.parts or not (folder / file).exists():
            raise RepositoryError(f"config.pbtxt: output '{output.name}': its folder has no label file '{file}'")
        path = _regular(_confine(folder / file, root))
        if path.stat().st_size > _MOST_LABEL_BYTES:
            raise RepositoryError(f"label file '{file}' is over {_MOST_LABEL_BYTES} bytes")
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise RepositoryError(f"label file '{file}' cannot be read: {error}") from error
        labels[output.name] = tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
    return labels


def _served_version(versions: Sequence[int], config: ModelConfig | None) -> int:
    """Return the highest allowed version; one version of a model is served at a time."""
    if not versions:
        raise RepositoryError("it has no version folder; put the program at NAME/1/" + _PROGRAM)
    if config is None or not config.version_policy.specific.versions:
        return versions[-1]
    wanted = sorted(set(config.version_policy.specific.versions))
    allowed = [version for version in versions if version in wanted]
    if not allowed:
        raise RepositoryError(f"version_policy asks for {wanted}, the versions are {list(versions)}")
    return allowed[-1]


def _regular(path: Path) -> Path:
    """Refuse folders, pipes and devices, which may never end when they are read."""
    if not path.is_file():
        raise RepositoryError(f"{path.name} is no regular file")
    return path


def _confine(path: Path, root: Path) -> Path:
    """Resolve links. Raises RepositoryError for a target outside of the repository, or none."""
    try:
        actual = path.resolve(strict=True)
    except (FileNotFoundError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        raise RepositoryError(f"{path.relative_to(root)} is a link that leads nowhere") from error
    if not actual.is_relative_to(root):
        raise RepositoryError(f"{path.relative_to(root)} is a link that leads out of the repository, to {actual}")
    return actual

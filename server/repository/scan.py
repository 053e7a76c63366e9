"""A model repository in Triton's layout: `NAME/VERSION/model.pt2`, and an optional `NAME/config.pbtxt`.

The `version_policy` of a configuration chooses the versions to serve: the latest ones, all, or the named ones.
"""

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from cohabit.runtime.lowering.archive_file import LOWERED_SUFFIX, ArchiveFile
from cohabit.server.errors import RepositoryError, did_you_mean
from cohabit.server.file_state import FileState
from cohabit.server.ipc.model import TOKENIZER
from cohabit.server.repository.sources import EnsembleSource, ModelSource, ScannedVersion, Unloadable
from cohabit.server.scheduling.policy import Policy
from cohabit.server.triton.config_fields import defaults_of, ignored_fields, pooling_of, refuse_fields
from cohabit.server.triton.ensembles import description_of, has_no_program, is_tokenizer, steps_of
from cohabit.server.triton.model_config import ModelConfig, read_config
from cohabit.server.triton.policies import policy_of

_log = logging.getLogger("cohabit.models")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}", re.ASCII)
_VERSION = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_PROGRAM = "model.pt2"
_MOST_LABEL_BYTES = 1 << 20
_WARMUP, _INITIAL_STATE = "warmup", "initial_state"


def scan(repository: Path, may_be_empty: bool = False) -> list[ScannedVersion]:
    """Find the versions to serve in a repository, sorted by name and version.

    Raises RepositoryError if there are no models.
    """
    try:
        root = require_repository(repository)
        folders = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise RepositoryError(f"model repository {repository} cannot be read: {error}") from error
    models = list(_models(folders, root))
    if not models and not may_be_empty:
        raise RepositoryError(f"model repository {repository} is empty; put models there as NAME/1/{_PROGRAM}")
    return models


def require_repository(repository: Path) -> Path:
    """Return a repository's folder, with links resolved.

    Raises RepositoryError if it is missing, or a part of a repository.
    """
    try:
        root = repository.resolve(strict=True)
    except FileNotFoundError as error:
        raise RepositoryError(f"model repository {repository} does not exist") from error
    _refuse_part(root)
    return root


def require_archive(path: Path) -> None:
    """Raise CohabitError if a file is something else than a `.pt2` archive, without importing torch."""
    if not path.is_file():
        return
    with ArchiveFile(path) as archive:
        if (kind := archive.other_kind) is not None:
            raise RepositoryError(f"{path} {kind}")


def _refuse_part(path: Path) -> None:
    """Raise RepositoryError for a part of a repository (a model, a version, a program), naming the repository."""
    if path.is_file() and path.suffix == Path(_PROGRAM).suffix:
        what, folder = "a model's program", path.parent.parent.parent
    elif _is_version(path):
        what, folder = "a version of a model", path.parent.parent
    elif path.is_dir() and any(map(_is_version, path.iterdir())):
        what, folder = "a model", path.parent
    else:
        return
    raise RepositoryError(
        f"{path} is {what}, not a repository of models; give the folder that has them: cohabit serve {folder}"
    )


def _is_version(folder: Path) -> bool:
    is_one = _VERSION.fullmatch(folder.name) is not None and folder.is_dir()
    return is_one and any(path.suffix in (".pt2", LOWERED_SUFFIX) for path in folder.iterdir())


def find(path: Path) -> ModelSource:
    """Find the model at a path: a program, or a model's folder, whose highest version is taken.

    Raises RepositoryError.
    """
    if path.is_file():
        in_repository = _VERSION.fullmatch(path.parent.name) is not None
        name = path.resolve().parent.parent.name if in_repository else path.stem
        return ModelSource(name, int(path.parent.name) if in_repository else 1, path)
    if not path.is_dir():
        there = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, there) or "; give its folder or a .pt2 file"
        raise RepositoryError(f"model {path} does not exist{hint}")
    folder = path.resolve()
    try:
        latest = _versions(folder, folder.parent)[-1]
        if isinstance(latest, Unloadable):
            raise RepositoryError(f"version {latest.version}: {latest.reason}")
        if isinstance(latest, EnsembleSource):
            steps = ", ".join(f"'{step.model}'" for step in latest.steps)
            way_out = f"; give one of its models: {steps}" if steps else ""
            raise RepositoryError(
                f"it is an entry of platform {latest.info.platform}, which has no program{way_out}"
            )
        return latest
    except RepositoryError as error:
        models = sorted(child.name for child in folder.iterdir() if any(child.glob(f"*/{_PROGRAM}")))
        if not models:
            raise RepositoryError(f"{path} is not a model: {error}") from error
        raise RepositoryError(
            f"{path} is a repository; give one of its models, such as {path / models[0]}"
        ) from error


def versions_of(
    repository: Path, name: str, override: ModelConfig | None = None, exactly: Collection[int] | None = None
) -> list[ScannedVersion]:
    """Find the versions of a model to serve; empty if it has no folder.

    `override` replaces its config.pbtxt, `exactly` the choice of its version policy. Raises RepositoryError.
    """
    if not _NAME.fullmatch(name):
        return []
    try:
        root = repository.resolve(strict=True)
        folder = root / name
        return _versions(folder, root, override, exactly) if folder.is_dir() else []
    except OSError as error:
        raise RepositoryError(f"model '{name}' of {repository} cannot be read: {error}") from error


def is_in_repository(repository: Path, name: str, version: int | None) -> bool:
    """Whether a model, or this version of it, has a folder."""
    return (repository / name / ("" if version is None else str(version))).is_dir()


def warn_of_ignored_config(source: ModelSource, device: str) -> None:
    """Log the fields of a model's configuration that have no effect, with the reasons."""
    ignored = {} if source.config is None else ignored_fields(source.config, device)
    if ignored:
        _log.warning("fields of config.pbtxt have no effect", extra={"fields": {**source.key.fields, **ignored}})


def _models(folders: Sequence[Path], root: Path) -> Iterator[ScannedVersion]:
    for folder in folders:
        try:
            if folder.is_dir() or folder.is_symlink():
                yield from _versions(folder, root)
        except (RepositoryError, OSError) as error:
            yield Unloadable(os.fsencode(folder.name).decode(errors="backslashreplace"), str(error))


def _versions(
    folder: Path, root: Path, override: ModelConfig | None = None, exactly: Collection[int] | None = None
) -> list[ScannedVersion]:
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
    wanted = _wanted(versions, config) if exactly is None else sorted(exactly)
    sent = None if override is None else bytes(override.SerializeToString())
    labels = {} if config is None else _labels(folder, root, config)
    if config is not None and has_no_program(config):
        if is_tokenizer(config):
            _named_file(folder, TOKENIZER, root, f"backend '{config.backend}': its folder has no file {TOKENIZER}")
        steps = steps_of(folder.name, config)
        infos = [description_of(folder.name, version, config, labels) for version in wanted]
        return [EnsembleSource(info, steps, config, sent) for info in infos]
    if config is not None:
        defaults_of(config)
        pooling_of(config)
    policy = policy_of(config) if config is not None else Policy()
    warmup = {} if config is None else _warmup_files(folder, root, config)
    states = {} if config is None else _state_files(folder, root, config)
    found: list[ScannedVersion] = []
    for version in wanted:
        try:
            path = _program(folder / str(version), root, config)
        except (RepositoryError, OSError) as error:
            found.append(Unloadable(folder.name, str(error), version))
        else:
            state, share = FileState.of(path), 1 / len(wanted)
            found.append(
                ModelSource(folder.name, version, path, config, policy, sent, labels, state, warmup, states, share)
            )
    return found


def _program(folder: Path, root: Path, config: ModelConfig | None) -> Path:
    """Return the program's file in a version's folder. Raises RepositoryError."""
    path = folder / ((config and config.default_model_filename) or _PROGRAM)
    if (lowered := path.with_suffix(LOWERED_SUFFIX)).exists() and not path.exists():
        path = lowered
    if path.parent != folder or not (path.exists() or path.is_symlink()):
        raise RepositoryError(f"it has no file {path.name}")
    return _regular(_confine(path, root))


def _labels(folder: Path, root: Path, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Read a model's label files, which have one class per line. Raises RepositoryError."""
    labels = {}
    for output in config.output:
        file = output.label_filename
        if not file:
            continue
        path = _named_file(folder, file, root, f"output '{output.name}': its folder has no label file '{file}'")
        if path.stat().st_size > _MOST_LABEL_BYTES:
            raise RepositoryError(f"label file '{file}' is over {_MOST_LABEL_BYTES} bytes")
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise RepositoryError(f"label file '{file}' cannot be read: {error}") from error
        labels[output.name] = tuple(line.removesuffix("\r") for line in text.removesuffix("\n").split("\n"))
    return labels


def _warmup_files(folder: Path, root: Path, config: ModelConfig) -> dict[str, tuple[Path, FileState | None]]:
    """Find the files of a model's warm-up. Raises RepositoryError."""
    files = {}
    for sample in config.model_warmup:
        for name in (given.input_data_file for given in sample.inputs.values() if given.input_data_file):
            missing = f"model_warmup '{sample.name}': its folder has no file '{_WARMUP}/{name}'"
            path = _named_file(folder / _WARMUP, name, root, missing)
            files[name] = path, FileState.of(path)
    return files


def _state_files(folder: Path, root: Path, config: ModelConfig) -> dict[str, tuple[Path, FileState | None]]:
    """Find the files of a model's initial states. Raises RepositoryError."""
    files = {}
    for state in config.sequence_batching.state:
        for name in (initial.data_file for initial in state.initial_state if initial.data_file):
            missing = f"state '{state.input_name}': its folder has no file '{_INITIAL_STATE}/{name}'"
            path = _named_file(folder / _INITIAL_STATE, name, root, missing)
            files[name] = path, FileState.of(path)
    return files


def _named_file(folder: Path, name: str, root: Path, missing: str) -> Path:
    """Return a folder's file that config.pbtxt names. Raises RepositoryError."""
    file = Path(name)
    if file.is_absolute() or ".." in file.parts or not (folder / file).exists():
        raise RepositoryError(f"config.pbtxt: {missing}")
    return _regular(_confine(folder / file, root))


def _wanted(versions: Sequence[int], config: ModelConfig | None) -> Sequence[int]:
    """Return the versions that the version policy chooses. Raises RepositoryError if there are none."""
    if not versions:
        way_out = "add an empty one, NAME/1" if has_no_program(config) else f"put the program at NAME/1/{_PROGRAM}"
        raise RepositoryError(f"it has no version folder; {way_out}")
    policy = (config or ModelConfig()).version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice in (None, "latest"):
        return versions[-max(1, policy.latest.num_versions) :]
    if choice == "all":
        return versions
    named = sorted(set(policy.specific.versions))
    if not (wanted := [version for version in versions if version in named]):
        raise RepositoryError(f"version_policy asks for {named}, the versions are {list(versions)}")
    return wanted


def _regular(path: Path) -> Path:
    """Refuse folders, pipes and devices: reading them may never end."""
    if not path.is_file():
        raise RepositoryError(f"{path.name} is not a regular file")
    return path


def _confine(path: Path, root: Path) -> Path:
    """Resolve links. Raises RepositoryError if the target is missing or outside the repository."""
    try:
        actual = path.resolve(strict=True)
    except (FileNotFoundError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        raise RepositoryError(f"{path.relative_to(root)} is a link that leads nowhere") from error
    if not actual.is_relative_to(root):
        raise RepositoryError(f"{path.relative_to(root)} is a link that leads out of the repository, to {actual}")
    return actual


def is_model_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None

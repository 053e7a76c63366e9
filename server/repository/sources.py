"""Versions of models that a repository has: where they are, how they are configured, and which cannot be loaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cohabit.server.file_state import FileState
from cohabit.server.ipc.model import ModelKey
from cohabit.server.scheduling.policy import Policy
from cohabit.server.triton.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A version of a model that may be loaded: its file, and the model's config.pbtxt if it has one."""

    name: str
    version: int
    path: Path
    config: ModelConfig | None = None
    policy: Policy = field(default_factory=Policy)
    override: bytes | None = None
    """The serialized `config`, if a client sent it to replace config.pbtxt."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of classes by output."""
    state: FileState | None = None
    """The file's state when it was found."""
    warmup_files: Mapping[str, tuple[Path, FileState | None]] = field(default_factory=dict)
    """The files of `model_warmup`, by their names there."""
    state_files: Mapping[str, tuple[Path, FileState | None]] = field(default_factory=dict)
    """The files of initial states of `sequence_batching`, by their names there."""
    rate_share: float = field(default=1.0, compare=False)
    """This version's part of the model's request rate, which its versions share equally."""

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version)

    def loads_as(self, other: "ModelSource") -> bool:
        """Whether to load the other one instead would change nothing: file and configuration are the same."""
        ours, theirs = (
            (s.path, s.state, s.labels, s.warmup_files, s.state_files, _without_version_policy(s.config))
            for s in (self, other)
        )
        return ours == theirs


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A version that cannot be loaded, or with None a folder that is no valid model, and the reason."""

    name: str
    reason: str
    version: int | None = None


ScannedVersion = ModelSource | Unloadable


def by_name(found: Iterable[ScannedVersion]) -> dict[str, list[ScannedVersion]]:
    """Group versions by their model."""
    models: dict[str, list[ScannedVersion]] = {}
    for entry in found:
        models.setdefault(entry.name, []).append(entry)
    return models


def _without_version_policy(config: ModelConfig | None) -> ModelConfig:
    """Return what of a configuration concerns each version; an empty one is as good as none."""
    own = ModelConfig()
    if config is not None:
        own.CopyFrom(config)
        own.ClearField("version_policy")
    return own

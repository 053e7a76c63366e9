"""Versions of models in a repository: their files and configurations, or why they cannot be loaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cohabit.server.file_state import FileState
from cohabit.server.ipc.model import ModelInfo, ModelKey
from cohabit.server.scheduling.policy import Policy
from cohabit.server.triton.ensembles import EnsembleStep
from cohabit.server.triton.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A version of a model to load: its file, and the model's config.pbtxt if it has one."""

    name: str
    version: int
    path: Path
    config: ModelConfig | None = None
    policy: Policy = field(default_factory=Policy)
    config_override: bytes | None = None
    """The serialized `config`, if a client sent it to replace config.pbtxt."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Class names by output."""
    state: FileState | None = None
    """The file's state when it was found."""
    warmup_files: Mapping[str, tuple[Path, FileState | None]] = field(default_factory=dict)
    """The files of `model_warmup`, by their names there."""
    state_files: Mapping[str, tuple[Path, FileState | None]] = field(default_factory=dict)
    """The files of initial states of `sequence_batching`, by their names there."""
    rate_share: float = field(default=1.0, compare=False)
    """This version's fraction of the model's request rate; all versions have the same."""

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version)

    def loads_as(self, other: "ModelSource") -> bool:
        """Whether loading `other` instead would change nothing: files and configuration are the same."""
        ours, theirs = (
            (s.path, s.state, s.labels, s.warmup_files, s.state_files, _without_version_policy(s.config))
            for s in (self, other)
        )
        return ours == theirs


@dataclass(frozen=True, slots=True)
class EnsembleSource:
    """A version of an ensemble to serve, whose steps agree with one another, but perhaps not with their models.

    A tokenizer is one without steps.
    """

    info: ModelInfo
    steps: tuple[EnsembleStep, ...]
    """In an order in which they can be executed."""
    config: ModelConfig
    config_override: bytes | None = None
    """As in `ModelSource`."""

    @property
    def key(self) -> ModelKey:
        return self.info.key

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def version(self) -> int:
        return self.info.version


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A version that cannot be loaded, and the reason. A `version` of None is an invalid model folder."""

    name: str
    reason: str
    version: int | None = None


ScannedVersion = ModelSource | EnsembleSource | Unloadable


def by_name(found: Iterable[ScannedVersion]) -> dict[str, list[ScannedVersion]]:
    """Group versions by their model."""
    models: dict[str, list[ScannedVersion]] = {}
    for entry in found:
        models.setdefault(entry.name, []).append(entry)
    return models


def _without_version_policy(config: ModelConfig | None) -> ModelConfig:
    """Return a configuration without its version policy; None becomes an empty one."""
    own = ModelConfig()
    if config is not None:
        own.CopyFrom(config)
        own.ClearField("version_policy")
    return own

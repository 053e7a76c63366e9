"""Settings of `cohabit scale`, and the resulting engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cohabit.planner.sizing.assignment import Assignment, ModelTraffic, assign
from cohabit.server.config.bundle import is_bundle
from cohabit.server.config.config import BY_KEY, ServeConfig, check_consistent
from cohabit.server.config.setting import Value
from cohabit.server.config.sizes import FixedSize
from cohabit.server.config.sources import config_of
from cohabit.server.config.values import integer
from cohabit.server.errors import ConfigError
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import ModelSource, by_name

ENGINE_SETTINGS = (
    *("repository", "memory", "device", "store", "link_bandwidth", "cache", "search", "rates"),
    *(
        "threads",
        "compute_lanes",
        "batch_sizes",
        "shape_buckets",
        "weights",
        "watchdog",
        "max_body",
        "queue_memory",
    ),
)
"""Settings of `cohabit serve` passed to every engine; `memory` is per engine."""
MOST_REPLICAS = 256
count = integer(1, MOST_REPLICAS)


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The common settings of all engines, and the models to assign to them."""

    config: ServeConfig
    traffic: Sequence[ModelTraffic]
    copies: int
    cpus: int
    gpus: int

    def assigned(self, engines: int) -> Assignment:
        """Return the models of each engine, for this number of engines."""
        assert isinstance(self.config.memory, FixedSize)
        return assign(self.traffic, engines, self.config.memory.nbytes, self.copies)


def plan_engines(values: Mapping[str, Value], copies: int = 1) -> ScalePlan:
    """Read the repository's models and the engines' settings. `values` are those of ENGINE_SETTINGS, by key.

    Raises ConfigError and RepositoryError.
    """
    if unknown := sorted(values.keys() - set(ENGINE_SETTINGS)):
        raise ConfigError(f"{unknown[0]}: engines have no such setting; theirs are {', '.join(ENGINE_SETTINGS)}")
    if missing := [key for key in ("repository", "memory") if values.get(key) is None]:
        raise ConfigError(f"{BY_KEY[missing[0]].flag} is missing")
    given = config_of(values)
    if is_bundle(given.repository):
        raise ConfigError(f"{given.repository} is a bundle, which is made for one engine; give a model repository")
    if not isinstance(given.memory, FixedSize):
        raise ConfigError("--memory: give the size that each engine has, such as 8GiB, and no share of weights")
    if given.device.partition(":")[2]:
        raise ConfigError(f"--device {given.device}: Ray chooses the GPU of each engine; give --device cuda")
    traffic = _traffic(given.repository, given.model_rates)
    config = replace(
        given,
        repository=given.repository.resolve(),
        cache=None if given.cache is None else given.cache.resolve(),
        threads=given.threads or (1 if given.device == "cpu" else None),
        model_control="explicit",
        http_port=0,
        grpc_port=None,
        metrics_port=None,
        client_shm="off",
        ui="off",
    )
    cpus = max(1, (config.threads or 1) * config.compute_lanes)
    check_consistent(config)
    return ScalePlan(config, traffic, copies, cpus, int(given.device != "cpu"))


def _traffic(repository: Path, rates: Mapping[str, float]) -> list[ModelTraffic]:
    """Return the models with their weights' size, taken from the archives, which store them unchanged."""
    models = by_name(entry for entry in scan(repository) if isinstance(entry, ModelSource))
    if unknown := sorted(rates.keys() - models.keys()):
        raise ConfigError(f"--rates: {repository} has no model '{unknown[0]}'; it has {', '.join(sorted(models))}")
    mean = sum(rates.values()) / len(rates) if rates else 1.0
    return [
        ModelTraffic(name, sum(v.path.stat().st_size for v in versions if isinstance(v, ModelSource)), rate)
        for name, versions in models.items()
        for rate in [rates.get(name, mean)]
    ]

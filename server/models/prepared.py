"""Preparation of a model: lowered, measured, its parameters in the host store."""

import logging
import shutil
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cohabit.planner.graph import fingerprint
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.deployment import ModelDemand
from cohabit.runtime.backend import Backend
from cohabit.runtime.devices import open_device
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.allowed_ops import draws
from cohabit.runtime.lowering.archive_file import LOWERED_SUFFIX, noted_fingerprint
from cohabit.runtime.lowering.archive_file import fingerprint as fingerprint_of
from cohabit.runtime.lowering.lower import Entry, Lowered, NotCached, cached, lower, notes_of
from cohabit.runtime.memory import HostStore
from cohabit.runtime.options import Options
from cohabit.runtime.profiling.profile import cached_profiles
from cohabit.runtime.profiling.stopwatch import NOISY
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.config.values import batches as parse_sizes
from cohabit.server.engine.servable import describe
from cohabit.server.file_state import FileState
from cohabit.server.models.known_models import KnownModel
from cohabit.server.models.options import options_of
from cohabit.server.models.repository import ModelSource
from cohabit.server.models.worker_process import EXPECTED, WorkerProcesses, stage
from cohabit.server.resources import available_cpus
from cohabit.server.triton.config_fields import parameter_of
from cohabit.server.triton.model_config import ModelConfig, config_mismatch, config_names

_log = logging.getLogger("cohabit.models")

OnProgress = Callable[[str, str], None]
_LARGE_BYTES = 64 << 20
"""Models of this size are measured in another process than the one that lowered them: that one keeps about 120 MiB of
torch's exporter, and to measure takes memory for all weights."""
SHAPE_BUCKETS = "cohabit.shape_buckets"
"""Key of `parameters` in a ModelConfig."""
BUNDLED = "bundled"
"""The device of a bundle's profiles, in their files' names."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be placed in memory. The caller closes its store."""

    source: ModelSource
    known: KnownModel
    store: HostStore[Any]
    rate_per_s: float = 1.0

    @property
    def lowered(self) -> Lowered:
        return self.known.lowered

    @property
    def profiles(self) -> dict[Bucket, Profile]:
        return self.known.profiles

    @property
    def weight_bytes(self) -> int:
        """The size of all parameters, including tables in host memory."""
        return self.lowered.manifest.segment_bytes + self.lowered.manifest.table_bytes

    @property
    def parameter_bytes(self) -> int:
        return self.lowered.graphs[min(self.lowered.graphs)].parameter_bytes

    @property
    def demand(self) -> ModelDemand:
        return ModelDemand(self.lowered.name, self.lowered.graphs, self.profiles, self.rate_per_s)


def warn_of_interaction(lowered: Lowered) -> None:
    """Log why a model's requests are neither padded nor batched, if they are not."""
    if lowered.interaction is not None:
        fields = {"model": lowered.name, "reason": lowered.interaction, "batch_sizes": list(lowered.batches)}
        _log.warning(
            "rows of a batch influence one another; requests run alone, at planned batch sizes only",
            extra={"fields": fields},
        )


def random_ops(lowered: Lowered) -> list[str]:
    """Return the names of the operators with which a model draws random numbers."""
    calls = [i for trace in lowered.traces.values() for i in trace.instructions]
    return sorted({str(i.target) for i in calls if draws(i.target, i.args, i.kwargs)})


def warn_of_random_ops(lowered: Lowered) -> None:
    """Log which of a model's operators draw random numbers: the same request has another answer each time."""
    if random := random_ops(lowered):
        fields = {"model": lowered.name, "operators": random}
        _log.warning(
            "the model draws random numbers; equal requests have different answers", extra={"fields": fields}
        )


def warn_of_noise(prepared: Prepared) -> None:
    """Log how noisy the measurement of a model was, if other work disturbed it."""
    noise = max(profile.noise for profile in prepared.profiles.values())
    if noise > NOISY:
        fields = {"model": prepared.lowered.name, "noise": f"{noise:.0%}", "limit": f"{NOISY:.0%}"}
        _log.warning(
            "a busy machine disturbed the model's profile; delete the cache's profiles folder to measure again",
            extra={"fields": fields},
        )


def warn_without_packing(config: ServeConfig) -> None:
    """Log why the CPU computes with plain weights, if it does."""
    if config.device == "cpu" and (reason := packing.unavailable()) is not None:
        fields = {"torch": str(torch.__version__), "reason": reason}
        _log.warning("weights are not packed, which makes kernels slower", extra={"fields": fields})


def open_backend(config: ServeConfig) -> Backend:
    """Open the device and set how torch computes on the CPU. Raises DeviceError for an unknown device."""
    torch.set_num_threads(threads_of(config))
    if config.device == "cpu":
        # Or else several threads add to the elements of an `index_put` in any order, which changes their last bits.
        # `torch.use_deterministic_algorithms` would import torch's compiler for this: a second, and 60 MiB.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # A new engine makes a changed file anew, unless there is no new engine, or no archive to make it from.
    remade = config.engine == "process" and config.bundle is None
    link = config.link_bandwidth_bytes_per_s
    return open_device(config.device, link, verify_reads=config.verifies_reads, lost_on_change=remade)


def threads_of(config: ServeConfig) -> int:
    """Return the number of threads of one inference; torch gives each lane's thread a pool of that size.

    By default one core is reserved for the swap-in lane and the front end, and the lanes divide the others.
    """
    return config.threads or max(1, (available_cpus() - 1) // config.compute_lanes)


def prepare(
    source: ModelSource,
    config: ServeConfig,
    backend: Backend,
    on_progress: OnProgress,
    *,
    archive: str | None = None,
    quick: bool = False,
) -> Prepared:
    """Lower and measure one model, unless the cache has the results. Raises CohabitError.

    With `archive`, the fingerprint of its archive, the model is taken from the cache, and the archive is not read;
    raises NotCached. Otherwise what the cache has of the model is made anew, once, after an unexpected error. With
    `quick`, its profiles may be provisional.
    """
    try:
        return _prepare(source, config, backend, on_progress, archive, quick)
    except EXPECTED:
        raise
    except Exception:
        if archive is not None or not _forget_lowered(source, config):
            raise
        _log.warning(
            "the cache was of no use, and is made anew", exc_info=True, extra={"fields": source.key.fields}
        )
        return _prepare(source, config, backend, on_progress, archive, quick)


def _prepare(
    source: ModelSource,
    config: ServeConfig,
    backend: Backend,
    on_progress: OnProgress,
    archive: str | None,
    quick: bool,
) -> Prepared:
    def progress(text: str) -> None:
        on_progress(source.name, text.removeprefix(f"{source.name}: "))

    cache, options, buckets = cache_of(config), model_options(source, config), wanted_buckets(source, config)
    name, batches, weights_cache = source.name, wanted_batches(source, config), cache / "weights"
    with stage(f"lowering model '{name}'"):
        if archive is not None:
            lowered = cached(archive, name, batches, weights_cache, options, buckets)
        else:
            lowered = lower(source.path, name, batches, weights_cache, progress, options, shape_buckets=buckets)
        release_free_memory()  # lowering has packed the weights one by one
        weights = FileState.of(lowered.weights_path)
        lowered = _with_config_names(source, lowered)
        _refuse_mismatch(source, lowered)
    with stage(f"opening the weights of model '{name}'"):
        store = backend.open_store(config.store_kind, lowered.weights_path, lowered.manifest)
    try:
        with stage(f"measuring model '{name}'"):
            if config.bundle is None:
                lowered, profiles = backend.measure(lowered, store, cache / "profiles", progress, quick=quick)
            else:
                profiles = bundled_profiles(lowered, cache / "profiles")
    except BaseException:
        store.close()
        raise
    return Prepared(source, KnownModel(lowered, profiles, weights), store, _rate(source, config))


def _forget_lowered(source: ModelSource, config: ServeConfig) -> bool:
    """Remove a lowered model from the cache; False if it is not there, or there is no archive to make it from."""
    if config.bundle is not None or source.path.suffix == LOWERED_SUFFIX:
        return False
    options, batches, buckets = (
        model_options(source, config),
        wanted_batches(source, config),
        wanted_buckets(source, config),
    )
    folder = Entry(cache_of(config) / "weights", fingerprint_of(source.path), batches, options, buckets).folder
    is_there = folder.is_dir()
    shutil.rmtree(folder, ignore_errors=True)
    return is_there


def prepare_closed(
    source: ModelSource, config: ServeConfig, on_progress: OnProgress, *, quick: bool = False
) -> Prepared:
    """Prepare a model on a device that is opened for it, and close the device and the model's parameters."""
    backend = open_backend(config)
    try:
        prepared = prepare(source, config, backend, on_progress, quick=quick)
        prepared.store.close()
        return prepared
    finally:
        backend.close()


def bundled_profiles(lowered: Lowered, folder: Path) -> dict[Bucket, Profile]:
    """Return the profiles that a bundle has of a model. Raises NotCached."""

    def missing() -> dict[Bucket, Profile]:
        raise NotCached(f"{lowered.name}: the bundle has no undamaged profile of it")

    return cached_profiles(lowered, BUNDLED, folder, missing, quick=False)


def store_profiles(lowered: Lowered, profiles: dict[Bucket, Profile], folder: Path) -> None:
    """Write a model's profiles to a bundle. They are valid on every machine that serves it."""
    cached_profiles(lowered, BUNDLED, folder, lambda: profiles, quick=False)


def machine_of(config: ServeConfig) -> str:
    """Return what programs and weights are valid for: the processor, if weights are packed, and torch's version."""
    if config.pack_weights and config.device == "cpu" and packing.unavailable() is None:
        return packing.machine()
    return f"plain weights, torch {torch.__version__}"


def prepare_known(source: ModelSource, known: KnownModel, config: ServeConfig, backend: Backend) -> Prepared:
    """Open the parameters of a known model. Raises CohabitError."""
    lowered = known.lowered
    _refuse_mismatch(source, lowered)
    store = backend.open_store(config.store_kind, lowered.weights_path, lowered.manifest)
    return Prepared(source, known, store, _rate(source, config))


def noted_archive(source: ModelSource, config: ServeConfig) -> str | None:
    """Return the fingerprint of a model's archive, if it is known without reading it. Raises ArchiveError."""
    return noted_fingerprint(source.path, notes_of(cache_of(config) / "weights"))


def key_of(source: ModelSource, archive: str, config: ServeConfig) -> Hashable:
    """Return a key of everything that a known model depends on. Raises RepositoryError."""
    options = model_options(source, config)
    tensors = () if source.config is None else (*source.config.input, *source.config.output)
    names = tuple(tensor.name for tensor in tensors)
    wanted = tuple(wanted_batches(source, config)), wanted_buckets(source, config)
    return source.name, archive, wanted, options, names


def prepare_in_worker(
    source: ModelSource, config: ServeConfig, backend: Backend, workers: WorkerProcesses, *, quick: bool = False
) -> Prepared:
    """Lower and measure a model in a worker process, unless the cache has it, and open it from the cache.

    Archives come from clients, so nothing else reads them. A damaged cache is made anew. With `quick`, its profiles may
    be provisional. Raises CohabitError.
    """
    archive, anew = noted_archive(source, config), False
    if archive is not None and (
        _marker(source, archive, config).exists()
        or (quick and _marker(source, archive, config, "provisional").exists())
    ):
        try:
            return prepare(source, config, backend, lambda *_: None, archive=archive, quick=quick)
        except NotCached as error:
            _log.warning("cache not usable, preparing again", extra={"fields": {"reason": str(error)}})
        except EXPECTED:
            raise
        except Exception:
            fields = source.key.fields
            _log.warning("the cache was of no use, and is made anew", exc_info=True, extra={"fields": fields})
            anew = True
    if quick or _is_large(source):
        made = _call_worker(source, config, workers, quick=True, anew=anew)
        anew = False
    if not quick:
        made = _call_worker(source, config, workers, quick=False, anew=anew)
    return prepare(source, config, backend, lambda *_: None, archive=made.archive, quick=quick)


def measure_in_worker(prepared: Prepared, config: ServeConfig, workers: WorkerProcesses) -> Prepared:
    """Measure a model whose profiles are provisional, in a worker process. Raises CohabitError."""
    profiles = _call_worker(prepared.source, config, workers, quick=False).profiles
    if any(profiles[bucket].graph != graph.fingerprint for bucket, graph in prepared.lowered.graphs.items()):
        raise UnsupportedModel(f"{prepared.source.name}: its archive has changed since it was loaded")
    return replace(prepared, known=KnownModel(prepared.lowered, profiles, prepared.known.weights))


def _is_large(source: ModelSource) -> bool:
    state = FileState.of(source.path)
    return state is not None and state.nbytes >= _LARGE_BYTES


@dataclass(frozen=True, slots=True)
class _Filled:
    """What a worker has put into the cache."""

    archive: str
    """Fingerprint of the archive that was read."""
    profiles: dict[Bucket, Profile]


def _call_worker(
    source: ModelSource, config: ServeConfig, workers: WorkerProcesses, *, quick: bool, anew: bool = False
) -> _Filled:
    if not quick and _is_large(source):
        workers.release()
    model_config = None if source.config is None else source.config.SerializeToString()
    return workers.call(_fill_cache, replace(source, config=None), model_config, config, quick, anew)


def _fill_cache(
    source: ModelSource, model_config: bytes | None, config: ServeConfig, quick: bool, anew: bool
) -> _Filled:
    """Prepare a model; with `anew`, whatever the cache has of it. Worker's process."""
    if model_config is not None:
        source = replace(source, config=ModelConfig.FromString(model_config))
    if anew:
        _forget_lowered(source, config)
    prepared = prepare_closed(source, config, lambda *_: None, quick=quick)
    archive = prepared.lowered.archive
    marker = _marker(source, archive, config, *(["provisional"] if prepared.known.is_provisional else []))
    with suppress(OSError):  # without it, the next start looks at the cache in a worker again
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return _Filled(archive, prepared.profiles)


def wanted_batches(source: ModelSource, config: ServeConfig) -> list[int]:
    """Return the batch sizes to plan; a config.pbtxt caps them, and adds its maximum and preferred sizes."""
    most = source.config.max_batch_size if source.config is not None else 0
    preferred = source.policy.preferred_batches
    if most <= 0:
        return sorted({*config.batch_sizes, *preferred})
    return sorted({b for b in (*config.batch_sizes, *preferred) if b < most} | {most})


def wanted_buckets(source: ModelSource, config: ServeConfig) -> tuple[int, ...]:
    """Return the sizes of dynamic dimensions to plan for; empty for the default. Raises RepositoryError."""
    return parameter_of(source.config, SHAPE_BUCKETS, parse_sizes) or config.shape_buckets or ()


def _marker(source: ModelSource, archive: str, config: ServeConfig, *more: str) -> Path:
    """Return the file that exists once a worker has prepared this model for this configuration."""
    threads = threads_of(config)
    options = asdict(model_options(source, config))
    made = (archive, wanted_batches(source, config), options, threads, packing.machine())
    link: tuple[object, ...] = (config.device, config.store, config.link_bandwidth_bytes_per_s)
    if buckets := wanted_buckets(source, config):
        link += (buckets,)
    return cache_of(config) / "prepared" / fingerprint((*made, *link, *more))[:32]


def model_options(source: ModelSource, config: ServeConfig) -> Options:
    return options_of(source, config.device, pack_weights=config.pack_weights)


def _with_config_names(source: ModelSource, lowered: Lowered) -> Lowered:
    """Give the inputs and outputs the names that config.pbtxt has for them."""
    if source.config is None:
        return lowered
    inputs, outputs = (
        tuple(replace(port, name=names.get(port.name, port.name)) for port in ports)
        for ports, given in ((lowered.inputs, source.config.input), (lowered.outputs, source.config.output))
        for names in [config_names([tensor.name for tensor in given], [port.name for port in ports])]
    )
    return replace(lowered, inputs=inputs, outputs=outputs)


def _refuse_mismatch(source: ModelSource, lowered: Lowered) -> None:
    info = describe(lowered, source.version, max(lowered.batches))
    if source.config is not None and (reason := config_mismatch(source.config, info)) is not None:
        raise UnsupportedModel(reason)


def _rate(source: ModelSource, config: ServeConfig) -> float:
    """Return a version's expected requests per second; a model without a rate gets the mean of the others."""
    given = config.model_rates
    mean = sum(given.values()) / len(given) if given else 1.0
    return given.get(source.name, mean) * source.rate_share

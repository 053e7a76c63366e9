"""Prepares models: lowers and measures them, and opens their parameters in the host store."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from cohabit.planner.profile import Profile
from cohabit.planner.shapes import DEFAULT_BUCKETS, Bucket, ShapeBuckets
from cohabit.runtime.backend import Backend
from cohabit.runtime.devices import DeviceOptions, open_device
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.archive_file import LOWERED_SUFFIX, fingerprint, noted_fingerprint, notes_of
from cohabit.runtime.lowering.lower import Entry, Lowered, NotCached, cached, lower
from cohabit.runtime.measure.profile import cached_profiles, forget
from cohabit.runtime.memory import HostStore
from cohabit.runtime.options import Options
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.config.machine import available_cpus, available_memory
from cohabit.server.config.values import shape_buckets as parse_sizes
from cohabit.server.deploy.model import Model
from cohabit.server.deploy.options import options_of
from cohabit.server.deploy.worker import EXPECTED, WorkerProcesses, stage
from cohabit.server.engine.servable import describe
from cohabit.server.repository.sources import ModelSource
from cohabit.server.scheduling.sequences import SequenceRules
from cohabit.server.triton.config_fields import parameter_of
from cohabit.server.triton.model_config import ModelConfig, config_mismatch, config_names
from cohabit.server.triton.sequences import rules_of, state_names, with_sequences

_log = logging.getLogger("cohabit.models")

OnProgress = Callable[[str, str], None]
DEFAULT_BATCHES = (1, 2, 4, 8)
SHAPE_BUCKETS = "cohabit.shape_buckets"
"""Key of `parameters` in a ModelConfig."""
_PAUSE, _LONGEST_PAUSE_S = 2.0, 0.5
"""After each step of opening a cached model, a load pauses for `_PAUSE` times the step's time, `_LONGEST_PAUSE_S` at
most: a client that loads small models in a loop uses at most a third of the interpreter's time."""
BUNDLED = "bundled"
"""Device name in the file names of a bundle's profiles."""


def open_backend(config: ServeConfig) -> Backend:
    """Set up torch and open the device. Raises DeviceError for an unknown device."""
    set_up_torch(config)
    # A restarted engine rebuilds a changed weights file. In process there is no restart, in a bundle no archive.
    rebuilds_on_restart = config.engine == "process" and config.bundle is None
    link = config.link_bandwidth_bytes_per_s
    memory_bytes, _ = available_memory()
    options = DeviceOptions(link, config.verifies_reads, rebuilds_on_restart, memory_bytes)
    return open_device(config.device, options)


def set_up_torch(config: ServeConfig) -> None:
    """Set the number of threads, and make results reproducible."""
    torch.set_num_threads(threads_of(config))
    if config.device == "cpu":
        # Otherwise threads add to the elements of an `index_put` in any order, which changes their last bits.
        # `torch.use_deterministic_algorithms` would import torch's compiler for this: a second, and 60 MiB.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def threads_of(config: ServeConfig) -> int:
    """Return the number of threads of one inference; torch gives each lane's thread a pool of that size.

    By default, one core is reserved for the swap-in lane and the front end. The lanes divide the others.
    """
    return config.threads or max(1, (available_cpus() - 1) // config.compute_lanes)


def prepare(
    source: ModelSource,
    config: ServeConfig,
    backend: Backend,
    workers: WorkerProcesses,
    on_progress: OnProgress = lambda name, stage: None,
    *,
    throttle: bool = False,
) -> Model:
    """Open a model from the cache; a worker process adds a missing model first. Raises CohabitError.

    Only worker processes read archives, because archives come from clients. A damaged cache is rebuilt. The model's
    profiles may be provisional. The caller closes its store. With `throttle`, pauses after each step, so that serving
    threads can run.
    """
    archive, rebuild = noted_fingerprint(source.path, notes_of(cache_of(config) / "weights")), False
    if archive is not None:
        try:
            return _opened(source, config, backend, archive, known_only=True, throttle=throttle)
        except NotCached as error:
            if config.bundle is not None:
                raise
            _log.info("the cache lacks the model", extra={"fields": {**source.key.fields, "reason": str(error)}})
        except EXPECTED:
            raise
        except Exception:
            _warn_of_useless_cache(source)
            rebuild = True

    def fill(rebuild: bool) -> str:
        if workers.inline:
            return lowered_and_measured(
                source, config, on_progress, quick=config.plans_later, rebuild=rebuild
            ).lowered.archive
        return _filled_by_worker(workers.call, source, config, quick=True, rebuild=rebuild)[0]

    try:
        return _opened(source, config, backend, fill(rebuild))
    except NotCached:  # another server that shares the cache has removed the model meanwhile
        return _opened(source, config, backend, fill(rebuild=False))


def _opened(
    source: ModelSource,
    config: ServeConfig,
    backend: Backend,
    archive: str,
    *,
    known_only: bool = False,
    throttle: bool = False,
) -> Model:
    """Open from the cache the model of the archive with this fingerprint. Raises NotCached.

    Without `known_only`, measures the model here if a full disk kept the profiles out of the cache. `throttle` pauses
    after each step, for serving threads.
    """
    cache = cache_of(config)
    profiles = cache / "profiles"

    def lowered() -> Lowered:
        options, buckets = model_options(source, config), wanted_buckets(source, config)
        return cached(archive, source.name, wanted_batches(source, config), cache / "weights", options, buckets)

    def measured(model: Lowered, store: HostStore[Any]) -> tuple[Lowered, dict[Bucket, Profile]]:
        if config.bundle is not None:
            return model, bundled_profiles(model, profiles)
        return backend.measure(model, store, profiles, lambda text: None, quick=True, known_only=known_only)

    return _made(source, config, backend, lowered, measured, throttle=throttle)


def _made(
    source: ModelSource,
    config: ServeConfig,
    backend: Backend,
    lowered_by: Callable[[], Lowered],
    measured_by: Callable[[Lowered, HostStore[Any]], tuple[Lowered, dict[Bucket, Profile]]],
    *,
    throttle: bool = False,
) -> Model:
    """Return a model lowered and measured by these functions. The caller closes its store."""
    name = source.name
    model = Model(source, _rate(source, config), plans_all_batches=config.batch_sizes is not None)
    with stage(f"lowering model '{name}'"), _pausing(throttle):
        lowered = _with_config_names(source, lowered_by())
        model.largest_batch = _largest_batch(source, lowered, config)
        model.sequences = rules = _checked_rules(source, lowered, model.largest_batch)
        if rules is not None and config.device == "cpu":
            # A CPU computes with growing states where they are gathered: --queue-memory counts them.
            lowered = lowered.lent(state.input for state in rules.states if state.axis is not None)
    with stage(f"opening the weights of model '{name}'"), _pausing(throttle):
        model.store = backend.open_store(config.store_kind, lowered.weights_path, lowered.manifest)
    try:
        with stage(f"measuring model '{name}'"), _pausing(throttle):
            model.lowered, model.profiles = measured_by(lowered, model.store)
    except BaseException:
        model.store.close()
        raise
    return model


@contextmanager
def _pausing(throttle: bool) -> Iterator[None]:
    """Pause after a step that may have held the interpreter lock, for a multiple of its time."""
    start_s = time.perf_counter()
    yield
    if throttle:
        time.sleep(min(_PAUSE * (time.perf_counter() - start_s), _LONGEST_PAUSE_S))


def measured_profiles(
    model: Model, config: ServeConfig, backend: Backend, workers: WorkerProcesses, *, again: bool = False
) -> dict[Bucket, Profile]:
    """Measure a model in a worker process, unless one of the same graphs was. Raises CohabitError.

    `again` discards the measurement that the model has. The process that lowered the model is not used, because it
    keeps torch's exporter (120 MiB). Models are measured one at a time, because they would disturb each other.
    """
    with suppress(NotCached):
        folder = cache_of(config) / "profiles"
        _, known = backend.measure(model.lowered, model.store, folder, lambda text: None, known_only=True)
        if not again or known != model.profiles:
            return known
    if again:
        forget(model.profiles.values(), cache_of(config) / "profiles")
    _, profiles = _filled_by_worker(workers.call_low_priority, model.source, config, quick=False)
    if any(profiles[bucket].graph != graph.fingerprint for bucket, graph in model.lowered.graphs.items()):
        raise UnsupportedModel(f"{model.source.name}: its archive has changed since it was loaded")
    return profiles


_Filled = tuple[str, dict[Bucket, Profile]]
"""Fingerprint of the archive that was read, and the cached profiles."""


def _filled_by_worker(
    call: Callable[..., _Filled], source: ModelSource, config: ServeConfig, *, quick: bool, rebuild: bool = False
) -> _Filled:
    model_config = None if source.config is None else source.config.SerializeToString()
    return call(_fill_cache, replace(source, config=None), model_config, config, quick, rebuild)


def _fill_cache(
    source: ModelSource, model_config: bytes | None, config: ServeConfig, quick: bool, rebuild: bool
) -> _Filled:
    """Lower and measure a model, unless the cache has it. Runs in a worker process."""
    if model_config is not None:
        source = replace(source, config=ModelConfig.FromString(model_config))
    model = lowered_and_measured(source, config, lambda name, stage: None, quick=quick, rebuild=rebuild)
    return model.lowered.archive, model.profiles


def lowered_and_measured(
    source: ModelSource,
    config: ServeConfig,
    on_progress: OnProgress,
    *,
    quick: bool = False,
    rebuild: bool = False,
) -> Model:
    """Lower and measure a model, unless the cache has it, on a device opened for this call. Its store is closed.

    With `quick`, profiles may be provisional. `rebuild` discards the model's cache entry first; an unexpected error
    does so once. Raises CohabitError.
    """
    if rebuild:
        _forget_lowered(source, config)
    backend = open_backend(config)
    try:
        return _lowered_and_measured(source, config, backend, on_progress, quick=quick)
    except EXPECTED:
        raise
    except Exception:
        if not _forget_lowered(source, config):
            raise
        _warn_of_useless_cache(source)
        return _lowered_and_measured(source, config, backend, on_progress, quick=quick)
    finally:
        backend.close()


def _lowered_and_measured(
    source: ModelSource, config: ServeConfig, backend: Backend, on_progress: OnProgress, *, quick: bool
) -> Model:
    cache = cache_of(config)

    def progress(text: str) -> None:
        on_progress(source.name, text.removeprefix(f"{source.name}: "))

    def lowered() -> Lowered:
        options, buckets = model_options(source, config), wanted_buckets(source, config)
        batches, weights = wanted_batches(source, config), cache / "weights"
        made = lower(source.path, source.name, batches, weights, progress, options, shape_buckets=buckets)
        release_free_memory()  # lowering packed the weights one by one, which leaves freed memory
        return made

    def measured(model: Lowered, store: HostStore[Any]) -> tuple[Lowered, dict[Bucket, Profile]]:
        return backend.measure(model, store, cache / "profiles", progress, quick=quick)

    model = _made(source, config, backend, lowered, measured)
    model.store.close()
    return model


def _warn_of_useless_cache(source: ModelSource) -> None:
    _log.warning("cached files are unusable; rebuilding them", exc_info=True, extra={"fields": source.key.fields})


def _forget_lowered(source: ModelSource, config: ServeConfig) -> bool:
    """Remove a lowered model from the cache. Returns False if it is not cached, or no archive can rebuild it."""
    if config.bundle is not None or source.path.suffix == LOWERED_SUFFIX:
        return False
    options, batches = model_options(source, config), wanted_batches(source, config)
    buckets = wanted_buckets(source, config)
    folder = Entry(cache_of(config) / "weights", fingerprint(source.path), batches, options, buckets).folder
    is_there = folder.is_dir()
    shutil.rmtree(folder, ignore_errors=True)
    return is_there


def bundled_profiles(lowered: Lowered, folder: Path) -> dict[Bucket, Profile]:
    """Return a bundle's profiles of a model. Raises NotCached."""

    def missing() -> dict[Bucket, Profile]:
        raise NotCached(f"{lowered.name}: the bundle has no undamaged profile of it")

    return cached_profiles(lowered, BUNDLED, folder, missing, quick=False)


def store_profiles(lowered: Lowered, profiles: dict[Bucket, Profile], folder: Path) -> None:
    """Write a model's profiles to a bundle. They are valid on every machine that serves it."""
    cached_profiles(lowered, BUNDLED, folder, lambda: profiles, quick=False)


def machine_of(config: ServeConfig) -> str:
    """Return the machine that programs and weights are valid for: torch's version and, for packed weights, the CPU."""
    if config.pack_weights and config.device == "cpu" and packing.unavailable() is None:
        return packing.machine()
    return f"plain weights, torch {torch.__version__}"


def wanted_batches(source: ModelSource, config: ServeConfig) -> list[int]:
    """Return the batch sizes to plan: those of --batch-sizes, or the defaults, up to the maximum of config.pbtxt."""
    most = _max_batch(source)
    sizes = config.batch_sizes or {*DEFAULT_BATCHES, *source.policy.preferred_batches, most or 1}
    return sorted(b for b in sizes if b <= most or not most) or [most]


def _largest_batch(source: ModelSource, lowered: Lowered, config: ServeConfig) -> int:
    """Return the largest batch that clients may send, which may be larger than the planned ones.

    With --batch-sizes, it is the maximum of config.pbtxt; otherwise the maximum is planned, and must be possible.
    """
    planned = max(lowered.batches)
    return max(planned, _max_batch(source)) if config.batch_sizes is not None and lowered.batched else planned


def _max_batch(source: ModelSource) -> int:
    return 0 if source.config is None else max(source.config.max_batch_size, 0)


def wanted_buckets(source: ModelSource, config: ServeConfig) -> ShapeBuckets:
    """Return the sizes of dynamic dimensions to plan for; empty for the default. Raises RepositoryError."""
    return parameter_of(source.config, SHAPE_BUCKETS, parse_sizes) or config.shape_buckets or DEFAULT_BUCKETS


def model_options(source: ModelSource, config: ServeConfig) -> Options:
    return options_of(source, config.device, pack_weights=config.pack_weights, weights=config.weights)


def _with_config_names(source: ModelSource, lowered: Lowered) -> Lowered:
    """Rename inputs and outputs as in config.pbtxt."""
    if source.config is None:
        return lowered
    kept_inputs, kept_outputs = state_names(source.config)
    inputs, outputs = (
        tuple(msgspec.structs.replace(port, name=names.get(port.name, port.name)) for port in ports)
        for ports, given, kept in (
            (lowered.inputs, source.config.input, kept_inputs),
            (lowered.outputs, source.config.output, kept_outputs),
        )
        for own in [[port.name for port in ports if port.name not in kept]]
        for names in [config_names([tensor.name for tensor in given], own)]
    )
    return replace(lowered, inputs=inputs, outputs=outputs)


def _checked_rules(source: ModelSource, lowered: Lowered, largest_batch: int) -> SequenceRules | None:
    """Return a model's sequence rules, if it has any. Raises if config.pbtxt contradicts the model."""
    if source.config is None:
        return None
    info = describe(lowered, source.version, largest_batch)
    rules = rules_of(source.config, info, {name: path for name, (path, _) in source.state_files.items()})
    if (reason := config_mismatch(source.config, with_sequences(info, rules))) is not None:
        raise UnsupportedModel(reason)
    return rules


def _rate(source: ModelSource, config: ServeConfig) -> float:
    """Return a version's expected requests per second; a model without a rate gets the mean of the others."""
    given = config.model_rates
    mean = sum(given.values()) / len(given) if given else 1.0
    return given.get(source.name, mean) * source.rate_share


_LEAST_DONE = 0.25
"""Fraction of the archives' bytes that are done before the remaining time is estimated: small models, which may come
first, say little about large ones."""


class TimeLeft:
    """Estimates the time left for preparing several models, from the sizes of their archives."""

    def __init__(self, sources: Sequence[ModelSource], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._all_bytes = {source.key: source.state.nbytes if source.state else 0 for source in sources}
        self._left_bytes = dict(self._all_bytes)

    def done(self, source: ModelSource) -> None:
        del self._left_bytes[source.key]

    @property
    def left(self) -> str:
        """Number of models done and the estimated time left, as text; empty before the first.

        The time is left out below _LEAST_DONE.
        """
        done = len(self._all_bytes) - len(self._left_bytes)
        if not done:
            return ""
        left_bytes, all_bytes = sum(self._left_bytes.values()), sum(self._all_bytes.values())
        done_bytes = all_bytes - left_bytes
        if done_bytes < _LEAST_DONE * all_bytes or not done_bytes:
            return f", {done} of {len(self._all_bytes)} done"
        left_s = (self._clock() - self._start_s) * left_bytes / done_bytes
        return f", {done} of {len(self._all_bytes)} done, about {left_s:.0f} s left"

"""Makes bundles: prepares a repository's models for one memory size, and writes the files that serving them needs.

See `server.config.bundle` for the folder's contents.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.sizing.problem import Division
from cohabit.runtime.lowering.archive_file import LOWERED_SUFFIX
from cohabit.runtime.lowering.lower import Entry
from cohabit.runtime.lowering.weights import files_of
from cohabit.server.config.bundle import CACHE, MANIFEST, MODELS, Bundle, BundledModel, described, read_bundle
from cohabit.server.config.config import BY_KEY, ServeConfig, cache_of
from cohabit.server.config.sizes import write_size
from cohabit.server.deploy.divide import Planner
from cohabit.server.deploy.model import Model, PlansFound
from cohabit.server.deploy.prepare import (
    OnProgress,
    lowered_and_measured,
    machine_of,
    store_profiles,
    wanted_batches,
    wanted_buckets,
)
from cohabit.server.deploy.worker import WorkerProcesses
from cohabit.server.errors import ConfigError, RepositoryError
from cohabit.server.ipc.model import GENERATION, TOKENIZER
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import EnsembleSource, ModelSource, Unloadable

RECORDED = (
    *("layout", "search", "device", "store", "model_control_mode", "compute_lanes"),
    *("batch_sizes", "shape_buckets", "weights"),
)
"""Settings of `serve` that plans and programs depend on, or that need files a bundle lacks."""


def export(config: ServeConfig, output: Path, on_progress: OnProgress) -> Bundle:
    """Prepare and plan every model of a repository, and write a bundle to a new folder.

    Raises ConfigError if the folder is not empty, RepositoryError for a model that cannot be served, and the errors of
    preparing and planning. A folder that was begun is removed.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output: {output} is not empty; name a new folder, or remove this one")
    models = [_prepared(source, config, on_progress) for source in _sources(config.repository)]
    planner = Planner(config, WorkerProcesses(inline=True))
    memory_bytes = config.memory.of(sum(model.weight_bytes for model in models))
    on_progress("planning", "dividing the memory")
    division = planner.division([model.demand for model in models], memory_bytes)
    entries: list[BundledModel] = []
    try:
        for model, memory in zip(models, division.memories, strict=True):
            on_progress(model.source.name, f"planning, {len(entries)} of {len(models)} models done")
            model.found = PlansFound(planner.best_plans(model.demand, memory), searched=True)
            on_progress(model.source.name, "writing")
            _write(model, memory, config, output)
            entries.append(_entry(model))
        _write_ensembles(config.repository, output)
        bundle = Bundle(
            memory_bytes,
            division.workspace_bytes,
            machine_of(config),
            _settings(config, memory_bytes),
            tuple(entries),
            {str(p.relative_to(output)): described(p) for p in sorted(output.rglob("*")) if p.is_file()},
            config.pack_weights,
        )
        (output / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(bundle)))
    except BaseException as error:
        shutil.rmtree(output, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--output: {error.filename or output}: {error.strerror or error}") from error
        raise
    return bundle


def fitting_bundle(folder: Path, config: ServeConfig) -> Bundle:
    """Read a bundle. Raises ConfigError, naming both machines, if it was made for another one."""
    bundle = read_bundle(folder)
    machine = machine_of(config)
    if bundle.machine != machine:
        raise ConfigError(
            f"{folder} was exported for {bundle.machine}; this machine has {machine}. Run cohabit export-bundle on this"
            " machine, or with --no-pack-weights and this machine's version of torch on another one; --threads sets the"
            " number of threads of both"
        )
    return bundle


def division_of(bundle: Bundle, sources: Sequence[ModelSource]) -> Division:
    """Return a bundle's division of memory among these models. Raises RepositoryError for a model not in it."""
    partitions = {(model.name, model.version): model.partition_bytes for model in bundle.models}
    if unknown := [source for source in sources if source.key not in partitions]:
        name, version = unknown[0].key
        raise RepositoryError(f"{name} version {version} is not in {MANIFEST}; export the bundle again")
    own = tuple(partitions[source.key] for source in sources)
    return Division(bundle.memory_bytes, bundle.workspace_bytes, own)


def damaged(bundle: Bundle, config: ServeConfig, reason: str) -> str:
    """Return why a bundle's model cannot be loaded, naming changed files."""
    assert config.bundle is not None
    files = "; ".join(bundle.damaged(config.bundle)) or "its files are as they were written"
    return f"{reason} ({files}); copy or export the bundle again"


def _sources(repository: Path) -> list[ModelSource]:
    sources = []
    for found in scan(repository):
        if isinstance(found, Unloadable):
            raise RepositoryError(f"{found.name}: {found.reason}; repair it, or take it out of {repository}")
        if isinstance(found, ModelSource):
            sources.append(found)
    return sources


def _write_ensembles(repository: Path, output: Path) -> None:
    """Copy the files of ensembles and tokenizers, which need no preparing."""
    for found in scan(repository):
        if isinstance(found, EnsembleSource):
            folder = output / MODELS / found.name
            (folder / str(found.version)).mkdir(parents=True)
            names = ["config.pbtxt"] + [o.label_filename for o in found.config.output if o.label_filename]
            if not found.steps:
                names.append(TOKENIZER)
            for name in names:
                _copy(repository / found.name / name, folder / name)


def _prepared(source: ModelSource, config: ServeConfig, on_progress: OnProgress) -> Model:
    """Lower and measure a model. Its store is closed."""
    return lowered_and_measured(source, config, on_progress)


def _write(model: Model, memory: Memory, config: ServeConfig, output: Path) -> None:
    """Write a model's part of a bundle."""
    source, cache = model.source, cache_of(config)
    lowered, batches, buckets = model.lowered, wanted_batches(source, config), wanted_buckets(source, config)
    entry = Entry(cache / "weights", lowered.archive, batches, lowered.options, buckets)
    for path in (entry.program_path, *files_of(lowered.weights_path)):
        _copy(path, output / CACHE / path.relative_to(cache))
    store_profiles(lowered, model.profiles, output / CACHE / "profiles")
    Library(output / CACHE).store_plans(model.demand, memory, config.search, model.plans)
    folder, copy = config.repository / source.name, output / MODELS / source.name
    given = source.config
    names = [] if given is None else ["config.pbtxt", *(o.label_filename for o in given.output if o.label_filename)]
    names += [f"warmup/{file}" for file in source.warmup_files]
    names += [f"initial_state/{file}" for file in source.state_files]
    for name in names:
        _copy(folder / name, copy / name)
    for name in (TOKENIZER, GENERATION):
        if (folder / name).is_file():
            _copy(folder / name, copy / name)
    stand_in = copy / str(source.version) / ((given and given.default_model_filename) or source.path.name)
    stand_in.parent.mkdir(parents=True)
    stand_in.with_suffix(LOWERED_SUFFIX).write_text(f"{lowered.archive}\n")


def _settings(config: ServeConfig, memory_bytes: int) -> dict[str, str | bool | None]:
    """Return the recorded settings as text."""
    recorded: dict[str, str | bool | None] = {"memory": write_size(memory_bytes)}
    for setting in map(BY_KEY.__getitem__, RECORDED):
        value = getattr(config, setting.field)
        recorded[setting.key] = value if value is None or setting.is_switch else setting.write(value)
    return recorded


def _copy(source: Path, target: Path) -> None:
    if not target.exists():  # models may share their weights
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _entry(model: Model) -> BundledModel:
    plan = model.plans[min(model.plans)]
    provenance = plan.provenance
    assert provenance is not None
    source = model.source
    return BundledModel(
        source.name,
        source.version,
        model.lowered.archive,
        model.weight_bytes,
        plan.memory.partition_bytes,
        provenance.latency_s,
        provenance.resident_s,
    )

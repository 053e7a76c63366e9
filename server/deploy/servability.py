"""Checks whether a model can be served, and in how much memory. Lowers and measures it without loading it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cohabit.planner.errors import CohabitError, InfeasibleBudget
from cohabit.planner.sizing.demand import MemoryDemand
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.runtime.lowering.encoding.choice import Encoding
from cohabit.runtime.lowering.validation import Validation
from cohabit.server.activations import Activations, workspace_words
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import MemorySize, ShareOfWeights
from cohabit.server.deploy.model import Model
from cohabit.server.deploy.notices import linear_forms, random_ops, stored_words
from cohabit.server.deploy.prepare import lowered_and_measured, open_backend
from cohabit.server.engine.servable import describe
from cohabit.server.errors import load_reason
from cohabit.server.ipc.model import ModelInfo
from cohabit.server.repository.scan import find, versions_of
from cohabit.server.repository.sources import EnsembleSource, Unloadable
from cohabit.server.triton.config_fields import ignored_fields, refused_fields
from cohabit.server.triton.ensembles import has_no_program, mismatch
from cohabit.server.triton.model_config import read_config
from cohabit.server.triton.sequences import with_sequences

_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)


class BudgetReport(msgspec.Struct, frozen=True):
    """Predictions for a model in a memory budget. Latencies are of quick plans; a search does not find worse ones."""

    memory_bytes: int
    reason: str | None = None
    """Why the model does not fit."""
    partition_bytes: int | None = None
    workspace_bytes: int | None = None
    most_batch: int | None = None
    """Largest planned batch; larger ones run in parts."""
    latency_s: dict[str, float] = {}
    """By bucket."""


class MemoryReport(msgspec.Struct, frozen=True):
    """A model's memory needs."""

    weight_bytes: int
    """Size of all parameters."""
    swappable_bytes: int
    table_bytes: int
    """Embedding tables that stay in host memory."""
    least_bytes: int
    """Partition and workspace together."""
    least_without_offloading_bytes: int
    """The same if activations stay in device memory."""
    resident_s: dict[str, float]
    """Measured latency with everything resident, by bucket: a batch size, then sizes of other dynamic dimensions."""
    budgets: tuple[BudgetReport, ...]
    activation_bytes: dict[str, int]
    """Activations and scratch, by bucket."""
    activations: str
    """Largest activations, and those of smaller batch sizes, as text."""
    noise: float
    """Disturbance of the measured times by other work."""


class ServabilityReport(msgspec.Struct, frozen=True):
    """Result of checking a model. Maps refused and ignored fields of config.pbtxt to reasons."""

    name: str
    servable: bool
    reason: str | None = None
    refused_fields: dict[str, str] = {}
    ignored_fields: dict[str, str] = {}
    info: ModelInfo | None = None
    batch_sizes: tuple[int, ...] = ()
    interaction: str | None = None
    """How rows influence one another; None if they do not. Then requests can be padded and batched."""
    memory: MemoryReport | None = None
    random_ops: tuple[str, ...] = ()
    """Operators that draw random numbers."""
    validation: Validation | None = None
    """Comparison of the lowered program with the archive's own."""
    changed_inputs: tuple[str, ...] = ()
    """Inputs that the program changes in place, which callers do not see."""
    stored: str | None = None
    """Stored size of encoded weights and its cost in accuracy, as text; None for unencoded weights."""
    encoding: Encoding | None = None
    linear_forms: dict[str, int] = {}
    """Number of linear layers per form, in the largest bucket."""


def report(
    path: Path, config: ServeConfig, budgets: Sequence[MemorySize], on_progress: Callable[[str], None]
) -> ServabilityReport:
    """Check a model's folder or archive. Without `budgets`, tries the least memory and fractions of the weights.

    Raises RepositoryError if the path does not exist, and DeviceError.
    """
    if not path.exists():
        find(path)  # raises
    name = find(path).name if path.is_file() else path.resolve().name
    refused: dict[str, str] = {}
    ignored: dict[str, str] = {}
    open_backend(config).close()
    try:
        if (path / "config.pbtxt").is_file():
            written = read_config(path / "config.pbtxt")
            refused, ignored = refused_fields(written), ignored_fields(written, config.device)
            if has_no_program(written):
                info, reason = _checked_ensemble(path.resolve(), config, on_progress)
                return ServabilityReport(name, reason is None, reason, refused, ignored, info)
        model = lowered_and_measured(find(path), config, lambda name, stage: on_progress(stage))
    except CohabitError as error:
        return ServabilityReport(name, False, load_reason(name, error), refused, ignored)
    on_progress("predicting latencies")
    lowered = model.lowered
    memory = _memory(model, budgets, config)
    return ServabilityReport(
        name,
        all(budget.reason is None for budget in memory.budgets) if budgets else True,
        None,
        refused,
        ignored,
        with_sequences(describe(lowered, model.source.version, model.largest_batch), model.sequences),
        lowered.batches,
        lowered.interaction,
        memory,
        tuple(random_ops(lowered)),
        lowered.validation,
        lowered.changed_inputs,
        stored_words(lowered),
        lowered.encoding,
        {str(form): count for form, count in linear_forms(lowered).items()},
    )


def _checked_ensemble(
    folder: Path, config: ServeConfig, on_progress: Callable[[str], None]
) -> tuple[ModelInfo, str | None]:
    """Lower the models of an ensemble's steps, and return how it contradicts them, or None. Raises CohabitError."""
    source = versions_of(folder.parent, folder.name)[-1]
    assert isinstance(source, EnsembleSource)
    infos = []
    for step in source.steps:
        numbers = None if step.version is None else (int(step.version),)
        found = versions_of(folder.parent, step.model, exactly=numbers)
        if not found:
            return source.info, f"{step}: there is no such model"
        if isinstance(found[-1], Unloadable):
            return source.info, f"{step}: {found[-1].reason}"
        if isinstance(found[-1], EnsembleSource):
            infos.append(found[-1].info)
            continue
        model = lowered_and_measured(found[-1], config, lambda name, stage: on_progress(f"{name}: {stage}"))
        infos.append(
            with_sequences(describe(model.lowered, found[-1].version, model.largest_batch), model.sequences)
        )
    return source.info, mismatch(source.info, source.steps, infos)


def _memory(model: Model, budgets: Sequence[MemorySize], config: ServeConfig) -> MemoryReport:
    demand, manifest = model.whole_demand, model.lowered.manifest
    kept = MemoryDemand.of(demand)
    fewest = MemoryDemand.of(demand.up_to(min(demand.batches)) if demand.splits_batches else demand)
    least = fewest.with_offloading().least_bytes
    shares = [share.of(model.weight_bytes) for share in map(ShareOfWeights, _SHARES)]
    sizes = [size.of(model.weight_bytes) for size in budgets] or [least, *(size for size in shares if size > least)]
    return MemoryReport(
        model.weight_bytes,
        manifest.segment_bytes,
        manifest.table_bytes,
        least,
        fewest.least_bytes,
        {str(bucket): profile.compute_s for bucket, profile in sorted(demand.profiles.items())},
        tuple(_budget(demand, memory_bytes, config.search) for memory_bytes in dict.fromkeys(sizes)),
        {str(bucket): footprint.activation_bytes for bucket, footprint in sorted(kept.footprints.items())},
        workspace_words(
            Activations(demand.name, bucket.batch, str(bucket), footprint.activation_bytes)
            for bucket, footprint in kept.footprints.items()
        ),
        model.noise,
    )


def _budget(demand: ModelDemand, memory_bytes: int, searcher: str) -> BudgetReport:
    """Divide a size as a server with this model alone does, which may leave out its largest batches."""
    try:
        division = divide([demand], memory_bytes)
        (memory,), (most_batch,) = division.memories, division.most_batches
        plans = plan_model(demand.up_to(most_batch), memory, None, searcher, quick=True)
    except InfeasibleBudget as error:
        return BudgetReport(memory_bytes, load_reason(demand.name, error))
    made = {str(bucket): plan.provenance for bucket, plan in plans.items()}
    latencies = {bucket: provenance.latency_s for bucket, provenance in made.items() if provenance is not None}
    return BudgetReport(memory_bytes, None, memory.partition_bytes, memory.workspace_bytes, most_batch, latencies)

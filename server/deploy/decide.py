"""Decides each model's memory (free memory, a new division, or the memory of the model it replaces) and first plans."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from cohabit.planner.errors import CohabitError, InfeasibleBudget, format_bytes
from cohabit.planner.graph import aligned
from cohabit.planner.lifetimes import live_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.sizing.problem import Division
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.lowering.lower import NotCached
from cohabit.runtime.memory import DeviceArena
from cohabit.runtime.pieces import HELD
from cohabit.runtime.stores.pages import Bytes, occupied_bytes, release_code_pages
from cohabit.server.config.bundle import Bundle
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.machine import resident_bytes
from cohabit.server.config.sizes import FixedSize
from cohabit.server.config.sources import QUEUE_SHARE
from cohabit.server.deploy.bundle import division_of
from cohabit.server.deploy.divide import Planner
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.model import (
    Model,
    PlansFound,
    are_siblings,
    demand_of,
    families_of,
    partitions_of,
    weight_bytes,
)
from cohabit.server.deploy.partitions import Partitions
from cohabit.server.deploy.prepare import OnProgress
from cohabit.server.deploy.worker import in_thread
from cohabit.server.errors import ConfigError

_log = logging.getLogger("cohabit.placement")

SERVING_BYTES = 44 << 20
"""Memory that the first requests add to a process: library code pages, oneDNN's kernels, thread stacks, heap.

Most is needed by a convolutional network: 20 MiB of code, 18 MiB of the other items, 6 MiB of page tables.
"""
_STEP_BYTES = 4 << 20
"""The models' memory is a multiple of this, so that the next start finds the same plans."""


@dataclass(frozen=True, slots=True)
class Resizing:
    """New partition sizes for loaded models, and new plans for some; all by partition id (`Model.partition_id`)."""

    models: Mapping[str, Sequence[Model]]
    """The models in each partition."""
    sizes: Mapping[str, int]
    workspace_bytes: int
    plans: Mapping[str, PlansFound]


@dataclass(frozen=True, slots=True)
class Decision:
    """Memory for new models, and the changes to loaded ones that free it."""

    memories: Mapping[str, Memory]
    """By partition id."""
    displaced: Model | None = None
    """The replaced model, if memory does not hold both."""
    resizing: Resizing | None = None


class Decider:
    """Belongs to the event loop's thread. The memory map must not change during a decision."""

    def __init__(
        self, config: ServeConfig, bundle: Bundle | None, memory: PartitionedMemory, planner: Planner
    ) -> None:
        self.memory_limit = config.memory
        """Limit for all models; with --process-memory, replaced by the size measured at the start."""
        self.memory_bytes = 0
        """Memory for all models. If none can be loaded later, the arena is only as large as they need."""
        self.is_divided_roughly = False
        """Whether the start's division was made by a rule of thumb or for other profiles."""
        self._process_memory: ProcessMemory | None = None
        """With --process-memory: the parts by which the start divided."""
        self._config = config
        self._bundle = bundle
        self._memory = memory
        self._planner = planner

    @property
    def _at_start(self) -> bool:
        return self._memory.arena is None

    async def decide(self, models: Sequence[Model], old: Model | None, on_progress: OnProgress) -> Decision:
        """Return memory for all initial models, or for one more, which may replace `old`. Sets their partition ids.

        Raises CohabitError if memory is too small; the error names the smallest sufficient size.
        """
        families = self._families(models)
        if len(models) == 1 and self._memory.models:
            (model,) = models
            if (sibling := self._sibling(model, old)) is not None:
                model.partition_id, model.profiles = sibling.partition_id, sibling.profiles
                model.most_batch = sibling.most_batch
                return Decision({model.partition_id: sibling.found.memory})
            if old is not None and len(partitions_of(self._memory.models.values())[old.partition_id]) > 1:
                old = None  # its family keeps the partition
            memory = await self._free_memory(model, None)
            if memory is not None:
                return Decision({model.partition_id: memory})
            memory = None if old is None else await self._free_memory(model, old)
            if memory is not None:
                return Decision({model.partition_id: memory}, displaced=old)
        return await self._divided(families, old, on_progress)

    def _families(self, models: Sequence[Model]) -> list[list[Model]]:
        """Return the families among new models, which take the profiles of their first member."""
        share = self._config.has_partitions and self._bundle is None
        families = families_of(models, self._memory.partitions.lanes) if share else [[model] for model in models]
        for model in models:
            model.load_id = self._memory.new_load_id(model.key)
        for family in families:
            for model in family:
                model.partition_id, model.profiles = family[0].load_id, family[0].profiles
        return families

    def _sibling(self, model: Model, old: Model | None) -> Model | None:
        """Return a loaded model whose partition a new one can use, in the smallest of such families; None without."""
        if not self._config.has_partitions or self._bundle is not None:
            return None
        found = [
            members
            for members in partitions_of(self._memory.models.values()).values()
            if (old is None or members[0].lane == old.lane) and are_siblings(members[0], model)
        ]
        return min(found, key=len)[0] if found else None

    async def plan(self, model: Model, memory: Memory, on_search: Callable[[], None]) -> None:
        """Set a model's plans: those of an equal model or cached ones if there are any, otherwise new ones.

        New plans are quick ones after the start, or if `plans_later` is set; otherwise a full search finds them. Raises
        NotCached if a bundle has no plans for the model.
        """
        for other in self._equals(model):
            if other.found.memory == memory:
                model.found = other.found
                return
        known = await in_thread(self._planner.known_plans, model.demand, memory)
        if known is None and self._bundle is not None:
            raise NotCached(f"{model.key.name}: the bundle has no intact plans for this model")
        if known is None:
            on_search()
        if known is None and (self._config.plans_later or not self._at_start):
            model.found = PlansFound(
                await in_thread(self._planner.quick_plans, model.demand, memory), searched=False
            )
            return
        plans = await in_thread(self._planner.best_plans, model.demand, memory) if known is None else known
        model.found = PlansFound(plans, searched=not model.is_provisional)

    async def _free_memory(self, model: Model, without: Model | None) -> Memory | None:
        """Return the part of free memory in which a model is fastest; None if it does not fit.

        The memory of the model `without` counts as free.
        """
        partitions = self._memory.partitions.copied()
        if without is not None:
            partitions.release(without.partition_id)
        memory = self._memory_of_equals(model, partitions)
        if memory is None:
            memory = await in_thread(self._planner.memory_for, model.demand, partitions)
        if memory is None or (self._all_resident and memory.partition_bytes < model.parameter_bytes):
            return None
        return memory

    def _equals(self, model: Model) -> Iterator[Model]:
        """Yield the loaded models with the same graphs and profiles, whatever their weights are."""
        for other in self._memory.models.values():
            if other.profiles == model.profiles and other.most_batch == model.most_batch:
                yield other

    def _memory_of_equals(self, model: Model, partitions: Partitions) -> Memory | None:
        """Return the memory of an equal model, if no larger partition is free, or if all parameters are resident in it.

        Then the planner, which may have to start a process, is not asked.
        """
        free = max((gap.nbytes for gap in partitions.gaps()), default=0)
        for other in self._equals(model):
            size = other.found.memory.partition_bytes
            is_best = size == free or model.parameter_bytes <= size <= free
            if is_best and other.found.memory.workspace_bytes == partitions.workspace_bytes:
                return other.found.memory
        return None

    async def _divided(
        self, families: Sequence[Sequence[Model]], old: Model | None, on_progress: OnProgress
    ) -> Decision:
        """Divide memory among these families and the loaded models; loaded ones that get less will move."""
        partitions = self._memory.partitions
        loaded = {
            key: models for key, models in partitions_of(self._memory.models.values()).items() if models != [old]
        }
        others = list(loaded.values())
        if self._all_resident and others:
            raise await in_thread(self._resident_refusal, families[0][0], list(loaded))
        measured = None
        if self._at_start:
            self.memory_bytes, measured = await in_thread(self._measured_memory, families)
        divide = partial(self._division, others, families, partial(on_progress, "planning", "dividing the memory"))
        division = await in_thread(divide)
        _leave_out_batches(families, division.most_batches[len(others) :])
        if measured is not None and (kept_bytes := await in_thread(self._kept_bytes, families, division)):
            # Activations are in the heap, beside the arena, whose workspace copies of other models have filled.
            measured = replace(measured, kept_bytes=kept_bytes)
            self.memory_bytes = await in_thread(self._within, measured, families)
            division = await in_thread(divide)
            _leave_out_batches(families, division.most_batches[len(others) :])

        self._process_memory = self._process_memory or measured

        # Loaded models keep their partitions, or shrink to their share.
        workspace = division.workspace_bytes
        held_bytes = {key: partitions.held[key].nbytes for key in loaded}
        shares, own = division.partition_bytes[: len(others)], division.partition_bytes[len(others) :]
        kept = {key: min(nbytes, held_bytes[key]) for key, nbytes in zip(loaded, shares, strict=True)}
        plans = {
            key: await in_thread(self._first_plans, models[0], Memory(workspace, kept[key]))
            for key, models in loaded.items()
            if kept[key] < held_bytes[key]
        }
        resizing = Resizing(loaded, kept, workspace, plans)
        memories = {f[0].partition_id: Memory(workspace, nbytes) for f, nbytes in zip(families, own, strict=True)}
        return Decision(memories, old, resizing)

    def _division(
        self,
        others: Sequence[Sequence[Model]],
        families: Sequence[Sequence[Model]],
        on_divided: Callable[[], None],
    ) -> Division:
        """Return the division of memory among families, loaded ones first. Raises InfeasibleBudget."""
        if self._bundle is not None:
            return division_of(self._bundle, [family[0].source for family in families])
        partitions, at_start = self._memory.partitions, self._at_start

        demands = [*map(demand_of, others), *(demand_of(family, whole=True) for family in families)]
        division = self._planner.division(
            demands,
            self.memory_bytes if at_start else partitions.arena_bytes,
            partitions.workspace_bytes if others else 0,
            on_divided,
            rough=at_start and self._config.plans_later,
        )
        self.is_divided_roughly = (
            at_start and self._config.plans_later and not self._planner.is_divided(demands, self.memory_bytes)
        )
        return division

    def _measured_memory(self, families: Sequence[Sequence[Model]]) -> tuple[int, "ProcessMemory | None"]:
        """Return the memory for the initial models, and with --process-memory the parts of the process's.

        Raises ConfigError if --process-memory leaves too little.
        """
        config, models = self._config, [model for family in families for model in family]
        if config.process_memory_bytes is None:
            return self.memory_limit.of(weight_bytes(models)), None
        measured = measure_process_memory(config.process_memory_bytes, models, config)
        return self._within(measured, families), measured

    def _within(self, measured: "ProcessMemory", families: Sequence[Sequence[Model]]) -> int:
        """Return what a process's memory leaves for the initial models. Raises ConfigError if it is too little."""
        if self._bundle is not None:
            measured.require(self._bundle.memory_bytes)
            return self._bundle.memory_bytes
        measured.require(
            self._planner.least_memory([demand_of(f, whole=True) for f in families], measured.models_bytes)
        )
        self.memory_limit = FixedSize(measured.models_bytes)
        return measured.models_bytes

    def warn_of_process_memory(self) -> None:
        """Warn if the server, measured with its models loaded, may exceed --process-memory.

        The division counted what was in memory before it. Bound plans and other objects of the start came later.
        """
        arena, parts = self._memory.arena, self._process_memory
        if arena is None or parts is None:
            return
        expected_bytes = parts.most_bytes(cast(DeviceArena[Bytes], arena), self._config.frontend_bytes)
        if expected_bytes > parts.limit_bytes:
            fields = {"process_memory": format_bytes(parts.limit_bytes), "may_take": format_bytes(expected_bytes)}
            if self._bundle is None:  # a bundle's models take the same memory whatever the limit
                lower_bytes = max(0, 2 * parts.limit_bytes - expected_bytes)
                fields["stays_within"] = f"--process-memory {lower_bytes >> 20}MiB"
            _log.warning("the processes may take more memory than --process-memory", extra={"fields": fields})

    def _kept_bytes(self, families: Sequence[Sequence[Model]], division: Division) -> int:
        """Return the memory that activations take beside a workspace that another model's copies have filled.

        The division counts them in the workspace. On a CPU they are in the heap, which keeps a quarter more.
        """
        models = [family[0] for family in families]
        most_bytes = [
            min(
                max(max(live_activation_bytes(graph)) for graph in model.demand.graphs.values()),
                division.workspace_bytes,
            )
            for model in models
        ]
        streamed = [
            nbytes
            for model, partition_bytes, nbytes in zip(models, division.partition_bytes, most_bytes, strict=True)
            if partition_bytes < model.parameter_bytes
        ]
        return (max(most_bytes) - min(streamed)) * 5 // 4 * self._config.compute_lanes if streamed else 0

    @property
    def _all_resident(self) -> bool:
        return self._config.layout == "resident"

    def _resident_refusal(self, model: Model, others: Sequence[str]) -> CohabitError:
        """Return the error for a model that does not fit in the resident layout."""
        partitions, name = self._memory.partitions, model.key.name
        workspace = self._planner.least_workspace(model.demand, partitions.arena_bytes)
        if partitions.lanes > 1 and workspace > partitions.workspace_bytes > 0:
            return MemoryExceeded(
                f"{name}: its activations need a workspace of {format_bytes(workspace)}, but each of the"
                f" {partitions.lanes} lanes has {format_bytes(partitions.workspace_bytes)}; load this model when the"
                " server starts, or before the others"
            )
        taken = sum(partitions.held[other].nbytes for other in others) + partitions.workspaces.nbytes
        return InfeasibleBudget(name, None, partitions.arena_bytes, taken + model.parameter_bytes)

    def _first_plans(self, model: Model, memory: Memory) -> PlansFound:
        """Return initial plans: cached ones, else quick ones."""
        known = self._planner.known_plans(model.demand, memory)
        return PlansFound(known or self._planner.quick_plans(model.demand, memory), searched=known is not None)


def _leave_out_batches(families: Sequence[Sequence[Model]], most_batches: Sequence[int]) -> None:
    """Apply a division's largest batches, and log the models whose larger batches are split."""
    for family, most in zip(families, most_batches, strict=bool(most_batches)):
        for model in family:
            model.plan_batches_to(most)
    if fewer := {m.key.name: m.most_batch for family in families for m in family if m.most_batch is not None}:
        _log.info(
            "largest batches run as several smaller ones: their activations would take memory that parameters need",
            extra={"fields": {"largest": fewer}},
        )


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The parts of a server's memory, in bytes."""

    limit_bytes: int
    base_bytes: int
    """Python, torch and the other libraries, graphs and profiles, in all processes."""
    store_bytes: int
    """Parameters in the host store; 0 with --store file."""
    queue_bytes: int
    state_bytes: int = 0
    """States of sequences; 0 if no model has any."""
    kept_bytes: int = 0
    """Freed activations in the heap, beside a workspace filled by copies."""

    @property
    def models_bytes(self) -> int:
        """Memory left for the models, at least 0."""
        left = self.limit_bytes - self._fixed_bytes - self.queue_bytes - self.state_bytes
        return max(0, left // _STEP_BYTES * _STEP_BYTES)

    @property
    def _fixed_bytes(self) -> int:
        return self.base_bytes + self.store_bytes + SERVING_BYTES + self.kept_bytes

    def most_bytes(self, arena: DeviceArena[Bytes], frontend_bytes: int) -> int:
        """Return what all processes may take, given this one before its first request: the arena will fill."""
        idle_bytes = arena.nbytes - occupied_bytes(arena.bytes(0, arena.nbytes))
        later_bytes = SERVING_BYTES + self.kept_bytes + self.queue_bytes + self.state_bytes
        return resident_bytes() + frontend_bytes + idle_bytes + later_bytes

    def require(self, models_bytes: int) -> None:
        """Raise ConfigError, with the size of each part, if the models get less than `models_bytes`."""
        if models_bytes <= self.models_bytes:
            return
        needed = aligned(models_bytes, _STEP_BYTES)
        queue_bytes, source = self.queue_bytes, "--queue-memory"
        if queue_bytes == self.limit_bytes // QUEUE_SHARE:  # the default, which grows with the limit
            shares = 2 if self.state_bytes else 1
            queue_bytes = (self._fixed_bytes + needed) // (QUEUE_SHARE - shares)
            source = "--queue-memory, by default 1/16 of all"
        parts = (
            ("Python, torch and the server", self.base_bytes),
            ("host store (less with --store file)", self.store_bytes),
            (f"requests ({source})", queue_bytes),
            *([("states of sequences (the same limit)", queue_bytes)] if self.state_bytes else []),
            ("code, kernels and heap of the first requests", SERVING_BYTES),
            *([("activations beside other models' copies", self.kept_bytes)] if self.kept_bytes else []),
            ("models, at least", needed),
        )
        table = "".join(f"\n  {what:<50}{format_bytes(nbytes):>12}" for what, nbytes in parts)
        least = -(-sum(nbytes for _, nbytes in parts) >> 20) + 1
        raise ConfigError(
            f"--process-memory {format_bytes(self.limit_bytes)} is not enough:{table}\n  set it to at least {least}MiB,"
            " or reduce one of these parts"
        )


def measure_process_memory(limit_bytes: int, models: Sequence[Model], config: ServeConfig) -> ProcessMemory:
    """Measure this process, once the models' host stores are open and before anything is loaded."""
    release_free_memory()
    release_code_pages()
    store_bytes = 0
    if config.store == "ram":  # on a CPU, pieces that models share are there once
        own_bytes = sum(model.lowered.manifest.file_bytes for model in models)
        store_bytes = HELD.nbytes if config.device == "cpu" else own_bytes
    base_bytes = resident_bytes() + config.frontend_bytes - store_bytes
    state_bytes = config.queue_bytes if any(model.sequences is not None for model in models) else 0
    return ProcessMemory(limit_bytes, base_bytes, store_bytes, config.queue_bytes, state_bytes)

"""Graphs with profiles to plan for: measured here, or read from files."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.search.registry import can_plan
from cohabit.server.commands.planning.files import read_graph, read_profile
from cohabit.server.commands.planning.flags import MEASURING, MemoryBudget
from cohabit.server.commands.planning.progress import SearchProgress
from cohabit.server.config.sources import config_of, given
from cohabit.server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeasuredGraph:
    """A model in one bucket."""

    graph: Graph
    profile: Profile
    weight_bytes: int
    """Size of the model's weights, including embedding tables in the host store; for a graph's file, without them."""

    def bytes_of(self, memory: MemoryBudget) -> int:
        return memory.size.of(self.weight_bytes)

    def search(
        self, searcher: str, memory: MemoryBudget, options: argparse.Namespace, progress: SearchProgress
    ) -> Plan:
        """Plan with the flags' effort. Raises InfeasibleBudget and the other errors of `planner.search.driver`."""
        from cohabit.planner.problem import (
            Limit,
            Problem,
        )  # importing the planner is slow, and --help does not need it
        from cohabit.planner.search.driver import search
        from cohabit.planner.warm import warm_up

        nbytes = self.bytes_of(memory)
        single = not can_plan(searcher, Problem(self.graph, self.profile, Memory(nbytes)))
        if options.time_limit is not None:  # the limit is for searching, not for compiling
            progress.doing(f"compiling the loops of {searcher}")
            warm_up(searcher, single=single)
        return search(
            Problem(self.graph, self.profile, single_budget(nbytes) if single else self._split(nbytes)),
            searcher,
            seed=options.seed,
            limit=Limit(options.evaluations, options.time_limit),
            workers=options.workers,
            on_progress=progress.searched,
            is_stopped=lambda: progress.is_stopped,
        )

    def _split(self, memory_bytes: int) -> Memory:
        from cohabit.planner.sizing.fitting import split_budget

        bucket = self.graph.bucket
        return split_budget({bucket: self.graph}, {bucket: self.profile}, memory_bytes)


def measured_graphs(options: argparse.Namespace, on_progress: Callable[[str], None]) -> list[MeasuredGraph]:
    """Return one per bucket, smallest first. Raises CohabitError."""
    if options.model is None:
        if options.graph is None or options.profile is None:
            raise ConfigError("give a MODEL, or both --graph and --profile")
        graph = read_graph(options.graph)
        profile = read_profile(options.profile, graph)
        return [_of_file(options, graph, profile)]
    if options.graph is not None or options.profile is not None:
        raise ConfigError("--graph and --profile are there to plan without a model; leave out MODEL or them")
    return _measured(options, on_progress)


def _of_file(options: argparse.Namespace, graph: Graph, profile: Profile) -> MeasuredGraph:
    if options.batch_sizes not in (None, (graph.batch,)):
        raise ConfigError(f"--batch-sizes: {options.graph} is a graph for batch {graph.batch}")
    return MeasuredGraph(graph, profile, graph.weight_bytes)


def _measured(options: argparse.Namespace, on_progress: Callable[[str], None]) -> list[MeasuredGraph]:
    from cohabit.server.repository.scan import find, require_archive

    config = config_of({"repository": str(options.model), "memory": "1B", **given(options, MEASURING)})
    config = replace(config, batch_sizes=options.batch_sizes or (1,))
    source = find(options.model)
    require_archive(options.model)
    on_progress(f"{source.name}: starting torch")
    from cohabit.server.deploy.prepare import lowered_and_measured

    prepared = lowered_and_measured(source, config, lambda name, stage: on_progress(f"{name}: {stage}"))
    graphs, profiles, batches = prepared.lowered.graphs, prepared.profiles, prepared.lowered.batches
    if missing := sorted(set(options.batch_sizes or ()) - set(batches)):
        has = ", ".join(map(str, batches)) if not prepared.lowered.batched else "smaller ones"
        raise ConfigError(f"--batch-sizes: {source.name} was not exported for batch {missing[0]}, but for {has}")
    return [MeasuredGraph(graphs[bucket], profiles[bucket], prepared.weight_bytes) for bucket in sorted(graphs)]

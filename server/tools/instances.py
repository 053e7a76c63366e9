"""What is planned: graphs and profiles, measured from a model or read from files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from planner.graph import Graph
from planner.problem import Problem
from planner.profile import Profile
from planner.sizing.fitting import split_budget
from server.errors import ConfigError
from server.tools.files import read_pair
from server.tools.options import Memory, Subject

SPLITTING = ("best", "streaming")
"""Searchers that serving uses: they plan a partition and a workspace."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One model at one batch size, and what its steps cost."""

    graph: Graph
    profile: Profile

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.graph.tensors if t.kind in ("parameter", "state"))

    def bytes_of(self, memory: Memory) -> int:
        return memory.size.of(self.weight_bytes)

    def problem(self, memory_bytes: int, searcher: str, single: bool) -> Problem:
        """The memory as the searcher takes it. Raises InfeasibleBudget."""
        if searcher not in SPLITTING or single:
            return Problem(self.graph, self.profile, memory_bytes, overlay=True)
        batch = self.graph.batch
        partition, workspace = split_budget({batch: self.graph}, {batch: self.profile}, memory_bytes)
        return Problem(self.graph, self.profile, partition, workspace)


def instances(subject: Subject, on_progress: Callable[[str], None]) -> list[Instance]:
    """Every batch size that was asked for, smallest first. Raises CohabitError."""
    if subject.model is None:
        assert subject.graph is not None
        assert subject.profile is not None
        return [_from_files(subject.graph, subject.profile, subject.batches)]
    return _from_model(subject.model, subject, on_progress)


def _from_files(graph_path: Path, profile_path: Path, batches: tuple[int, ...] | None) -> Instance:
    graph, profile = read_pair(graph_path, profile_path)
    if batches is not None and batches != (graph.batch,):
        raise ConfigError(f"--batch: {graph_path} is a graph for batch {graph.batch}")
    return Instance(graph, profile)


def _from_model(model: Path, subject: Subject, on_progress: Callable[[str], None]) -> list[Instance]:
    from server.models.repository import find

    source = replace(find(model), config=None)
    on_progress(f"{source.name}: starting torch")
    from server.models.prepared import open_backend, prepare

    backend = open_backend(subject.config)
    prepared = prepare(source, subject.config, backend, lambda name, stage: on_progress(f"{name}: {stage}"))
    prepared.store.close()
    backend.close()
    graphs, profiles = prepared.lowered.graphs, prepared.profiles
    if subject.batches is not None and (missing := sorted(set(subject.batches) - set(graphs))):
        has = ", ".join(map(str, sorted(graphs))) if not prepared.lowered.batched else "smaller ones"
        raise ConfigError(f"--batch: {source.name} was not exported for batch {missing[0]}, but for {has}")
    return [Instance(graphs[batch], profiles[batch]) for batch in sorted(graphs)]

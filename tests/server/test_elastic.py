"""Memory is divided again when measured request rates make it pay: with made-up models, and a clock that tests set."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cohabit.planner.memory import Memory
from cohabit.planner.shapes import Bucket
from cohabit.server.deploy import elastic
from cohabit.server.deploy.elastic import REQUESTS_PER_MODEL, Elastic
from cohabit.server.deploy.model import PlansFound

NAMES = "abcdefgh"
SIZES = (0, 10, 20, 40)
COMPUTE_S, COPIED_S = 0.001, 0.004
WEIGHTS_BYTES = 40


def plans(nbytes: int) -> Any:
    """Plans by which what is not resident is copied."""
    latency_s = COMPUTE_S + COPIED_S * (1 - nbytes / WEIGHTS_BYTES)
    return {Bucket(1): SimpleNamespace(memory=Memory(5, nbytes), provenance=SimpleNamespace(latency_s=latency_s))}


class FakePlacement:
    """Eight models that share memory for two of them; where they lie does not matter."""

    def __init__(self) -> None:
        self.models = {name: self.model(name, 10) for name in NAMES}
        workspaces, arena_bytes = SimpleNamespace(nbytes=5), 5 + 2 * WEIGHTS_BYTES
        held = SimpleNamespace(get=None)
        self.partitions = SimpleNamespace(
            workspace_bytes=5, workspaces=workspaces, arena_bytes=arena_bytes, held=held
        )
        self.memory = SimpleNamespace(models=self.models, partitions=self.partitions)
        self.replanner = SimpleNamespace(is_busy=False, begin=lambda models: self.improved.extend(models))
        self.planner = SimpleNamespace(
            first_plans_by_size=lambda demand, workspace: [(plans(size), False) for size in SIZES]
        )
        self.improved: list[Any] = []
        self.sizes: list[dict[str, int]] = []
        """After each division."""
        self._hold()

    @staticmethod
    def model(name: str, nbytes: int) -> Any:
        profiles = {Bucket(1): SimpleNamespace(compute_s=COMPUTE_S)}
        key = SimpleNamespace(name=name)
        return SimpleNamespace(
            key=key,
            load_id=name,
            partition_id=name,
            demand=None,
            profiles=profiles,
            plans=plans(nbytes),
            found=PlansFound(plans(nbytes), searched=True),
            rate_per_s=1.0,
            latency_s=lambda made: made[Bucket(1)].provenance.latency_s,
        )

    def _hold(self) -> None:
        sizes = {name: model.plans[Bucket(1)].memory.partition_bytes for name, model in self.models.items()}
        self.partitions.held = {name: SimpleNamespace(nbytes=nbytes) for name, nbytes in sizes.items()}

    async def redivide(self, choose: Callable[[], Mapping[str, Any] | None]) -> bool:
        chosen = choose()
        if not chosen:
            return False
        for name, found in chosen.items():
            self.models[name].found, self.models[name].plans = found, found.plans
        self._hold()
        self.sizes.append({name: extent.nbytes for name, extent in self.partitions.held.items()})
        return True


class Rates:
    """An elastic division of the fake's memory, and the requests that it sees, a second at a time."""

    def __init__(self) -> None:
        self.placement = FakePlacement()
        self.now_s = 0.0
        self.requests = dict.fromkeys(NAMES, 0)
        self.elastic = Elastic(self.placement, self.placement.replanner, lambda: self.requests, lambda: self.now_s)  # type: ignore[arg-type]

    def pass_second(self, requests: Mapping[str, int]) -> None:
        self.now_s += 1.0
        for name, count in requests.items():
            self.requests[name] += count
        asyncio.run(self.elastic.check())


@pytest.fixture
def rates() -> Rates:
    return Rates()


def zipf(first: str, rng: np.random.Generator, total: int = 200) -> dict[str, int]:
    """Draw a second's requests, of which `first` has the most."""
    weights = np.array([1 / (k + 1) ** 1.2 for k in range(len(NAMES))])
    counts = rng.multinomial(total, weights / weights.sum())
    start = NAMES.index(first)
    return {NAMES[(start + k) % len(NAMES)]: int(count) for k, count in enumerate(counts)}


def test_the_popular_models_get_the_memory_within_a_few_seconds(rates: Rates) -> None:
    rng = np.random.default_rng(0)
    for first in "aef":
        for _ in range(6):
            rates.pass_second(zipf(first, rng))
        sizes = rates.placement.sizes[-1]
        assert sizes[first] == WEIGHTS_BYTES
        assert sum(sizes.values()) <= 2 * WEIGHTS_BYTES
        popular = rates.placement.models[first]
        assert popular.rate_per_s == max(model.rate_per_s for model in rates.placement.models.values())
        assert popular in rates.placement.improved, "its quick plans are improved"
    assert sum(model.rate_per_s for model in rates.placement.models.values()) == pytest.approx(len(NAMES))


def test_chance_moves_nothing(rates: Rates) -> None:
    """Rates that stay the same are drawn again every second for ten minutes: memory is divided once."""
    rng = np.random.default_rng(1)
    for _ in range(600):
        rates.pass_second(zipf("c", rng))
    assert rates.elastic.divisions == len(rates.placement.sizes) == 1


def test_a_few_requests_say_nothing(rates: Rates) -> None:
    rates.pass_second({})
    for _ in range(REQUESTS_PER_MODEL * len(NAMES) - 1):
        rates.pass_second({"h": 1})
    assert rates.elastic.divisions == 0
    rates.pass_second({"h": 1})
    assert rates.elastic.divisions == 1


def test_models_that_come_and_go_stop_no_division(rates: Rates) -> None:
    """Every third second a model comes, and another leaves, with the counters of an earlier load of its version."""
    for second in range(30):
        if second % 3 == 0:
            name = f"new {second}"
            rates.placement.models[name] = rates.placement.model(name, 0)
            rates.requests[name] = 100_000
            rates.placement.models.pop(f"new {second - 3}", None)
            rates.requests.pop(f"new {second - 3}", None)
            rates.placement._hold()
        rates.pass_second({"a": 100})
    assert rates.elastic.divisions == 1
    sizes = rates.placement.sizes[0]
    assert max(sizes, key=lambda owner: sizes[owner]) == "a"


def test_a_model_that_has_come_keeps_its_size_until_it_is_planned(rates: Rates) -> None:
    asyncio.run(rates.elastic._plan(rates.placement.models))
    rates.placement.models["new"] = rates.placement.model("new", 1)
    rates.requests["new"] = 0
    rates.placement._hold()
    rates.placement.replanner.is_busy = True  # it is measured
    for _ in range(4):
        rates.pass_second({"b": 1000, "new": 2000})
    assert rates.elastic.divisions == 1
    assert rates.placement.sizes[0]["new"] == 1


def test_models_that_are_being_measured_are_waited_for(rates: Rates) -> None:
    rates.placement.replanner.is_busy = True
    for _ in range(5):
        rates.pass_second({"a": 1000})
    assert rates.elastic.divisions == 0
    rates.placement.replanner.is_busy = False
    rates.pass_second({"a": 1000})
    assert rates.elastic.divisions == 1


def test_a_model_that_leaves_while_sizes_are_compared_stops_the_division(
    rates: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates.pass_second({})
    rates.pass_second({"a": 1000})
    share_out = elastic._share_out

    def shared(*arguments: Any) -> Any:
        chosen = share_out(*arguments)
        rates.placement.models.pop("h")
        return chosen

    monkeypatch.setattr(elastic, "_share_out", shared)
    rates.pass_second({"a": 1000})
    assert rates.elastic.divisions == 0
    assert rates.placement.sizes == []

"""Parts are found by name: the core's, the wings' whose folders are there, and those of installed packages."""

import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from cohabit.planner import parts
from cohabit.planner.errors import UnknownSearcher
from cohabit.planner.memory import single_budget
from cohabit.planner.parts import Part, PartRegistry
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search import registry
from cohabit.planner.search.driver import search
from tests.support.planner.graphs import PAGE, chain, profile_of

GROUP = "cohabit.searchers"
MODULE = """from cohabit.planner.papers.swapadvisor.on_demand import OnDemand as Mine
about = "a module"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a package with entry points; registries made afterwards see it."""

    def install(**entries: str) -> None:
        folder = tmp_path / "mine-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {path}" for name, path in entries.items())
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}\n")
        (tmp_path / "mine_package.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path)
        invalidate_caches()

    return install


def test_an_installed_package_adds_a_searcher(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(mine="mine_package:Mine", best="nowhere:Nothing")
    searchers = PartRegistry(GROUP, registry.SEARCHERS._core)
    monkeypatch.setattr(registry, "SEARCHERS", searchers)
    assert "mine" in searchers
    assert list(searchers)[-1] == "mine"
    assert searchers.all["mine"].about == "from the package mine"
    assert searchers.all["best"] == registry.SEARCHERS.own["best"], "the core's names win"
    graph = chain([PAGE, 2 * PAGE, PAGE])
    problem = Problem(graph, profile_of(graph), single_budget(8 * PAGE))
    plan = search(problem, "mine", limit=Limit(evaluations=2))
    assert plan.steps == search(problem, "on_demand", limit=Limit(evaluations=2)).steps


def test_a_part_is_a_module_or_one_of_its_names(installed: Callable[..., None]) -> None:
    installed()
    found = PartRegistry("any", {"module": Part("mine_package"), "name": Part("mine_package:about")})
    assert found["name"] == "a module"
    assert found["module"] is sys.modules["mine_package"]
    assert (len(found), dict(found) == {"module": found["module"], "name": "a module"}) == (2, True)


def test_a_name_that_nothing_has_is_a_key_error() -> None:
    assert "magic" not in registry.SEARCHERS
    with pytest.raises(KeyError):
        registry.SEARCHERS["magic"]
    graph = chain([PAGE])
    with pytest.raises(UnknownSearcher, match="there are best, genetic, offloading"):
        registry.make("magic", Problem(graph, profile_of(graph), single_budget(PAGE)), 0)


@pytest.mark.parametrize("wing", parts.WINGS)
def test_the_parts_of_a_wing_can_be_imported(wing: str) -> None:
    groups = import_module(f"cohabit.{wing}.wing").PARTS
    assert groups
    for group, named in groups.items():
        found = PartRegistry(group, {})
        assert all(found[name] is not None for name in named)


def test_a_wing_that_fails_to_import_something_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only a missing folder means that a wing is not there."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wing.py").write_text("import no_such_library")
    monkeypatch.setattr(import_module("cohabit"), "__path__", [*import_module("cohabit").__path__, str(tmp_path)])
    monkeypatch.setattr(parts, "WINGS", ("missing", "broken"))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        parts.wings.__wrapped__()
    monkeypatch.setattr(parts, "WINGS", ("missing",))
    assert parts.wings.__wrapped__() == ()

"""`cohabit plan` and `show` as a user meets them: files, tables, messages, exit statuses."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import cohabit.planner.graph
import cohabit.planner.plan
import cohabit.planner.profile
from cohabit.planner.check import check
from cohabit.planner.memory import single_budget
from cohabit.planner.search import registry
from cohabit.planner.tiling import SEARCHES
from cohabit.server.cli import main
from cohabit.server.commands.planning.progress import SearchProgress
from cohabit.server.commands.tile import SEARCH_NAMES
from cohabit.server.errors import RepositoryError
from cohabit.server.format import gap, milliseconds, nice_ticks, percent, round_time, shortened
from cohabit.server.repository.scan import find
from tests.support.planner.graphs import PAGE, chain, profile_of
from tests.support.runtime import models

pytestmark = pytest.mark.process

GRAPH = chain([PAGE, 2 * PAGE, PAGE, 3 * PAGE])
PROFILE = profile_of(GRAPH, op_s=1e-3, bandwidth=PAGE / 1e-3)
PAIR = ("--graph", "chain.graph.json", "--profile", "chain.profile.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a graph and its profile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chain.graph.json").write_bytes(cohabit.planner.graph.encode(GRAPH))
    (tmp_path / "chain.profile.json").write_bytes(cohabit.planner.profile.encode(PROFILE))
    return tmp_path


def planned(*more: str, memory: str = "28KiB") -> Path:
    """Plan the chain, with the quickest of searchers if no other is named, and return the one plan's file."""
    assert main(["plan", *PAIR, "--memory", memory, "--search", "on_demand", *more]) == 0
    (path,) = Path("plans").glob("*.plan.json")
    return path


def test_the_times_of_a_disturbed_profile_are_called_provisional(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned()
    assert "provisional" not in capsys.readouterr().err
    noisy = replace(PROFILE, noise=0.35)
    (folder / "chain.profile.json").write_bytes(cohabit.planner.profile.encode(noisy))
    assert main(["plan", *PAIR, "--memory", "24KiB", "--search", "on_demand"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the times are provisional: other work disturbed the measurement by 35.0 %" in said
    assert "measures it again" in said


def status(arguments: list[str]) -> object:
    """Run a command, also one that the parser of the command line refuses."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def test_plan_writes_a_plan_its_graph_and_its_profile(capsys: pytest.CaptureFixture[str]) -> None:
    path = planned("--search", "best", "--evaluations", "2", memory="48KiB")
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "chain-b1-48KiB-best.plan.json",
        "chain-b1.graph.json",
        "chain-b1.profile.json",
    ]
    plan = cohabit.planner.plan.decode(path.read_bytes())
    check(GRAPH, PROFILE, plan)
    assert plan.memory.nbytes == 48 << 10
    assert plan.memory.workspace_bytes > 0
    assert plan.provenance is not None
    shown = capsys.readouterr().out
    assert milliseconds(plan.provenance.latency_s) in shown
    assert "chain-b1-48KiB-best.plan.json" in shown
    assert "48.0 KiB" in shown


def test_an_infeasible_budget_is_named_and_the_others_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *PAIR, "--memory", "4KiB,28KiB,100%", "--search", "on_demand"]) == 2
    shown = capsys.readouterr()
    assert "chain: op op3 needs a budget of 20.0 KiB" in shown.err
    assert "infeasible: needs 20.0 KiB" in shown.out
    assert [p.name for p in sorted(Path("plans").glob("*.plan.json"))] == [
        "chain-b1-100pct-on_demand.plan.json",
        "chain-b1-28KiB-on_demand.plan.json",
    ]
    assert main(["plan", *PAIR, "--memory", "4KiB"]) == 2
    assert capsys.readouterr().out == "", "nothing feasible leaves no table"


def test_an_interrupt_keeps_the_best_plan_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: SearchProgress, evaluations: int, best_s: float, bound_s: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SearchProgress, "searched", interrupted)
    before = signal.getsignal(signal.SIGINT)
    path = planned("--search", "best", "--time-limit", "1h", memory="48KiB")
    assert signal.getsignal(signal.SIGINT) is before
    check(GRAPH, PROFILE, cohabit.planner.plan.decode(path.read_bytes()))
    assert "the best plans so far are kept" in capsys.readouterr().err


@pytest.mark.parametrize("search", ["on_demand", "vdnn"])
def test_papers_searchers_and_baselines_plan_one_budget(search: str) -> None:
    path = planned("--search", search, "--seed", "3")
    assert path.name == f"chain-b1-28KiB-{search}-seed3.plan.json"
    plan = cohabit.planner.plan.decode(path.read_bytes())
    check(GRAPH, PROFILE, plan)
    assert plan.memory == single_budget(28 << 10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--memory", "1MiB"], "give a MODEL, or both --graph and --profile"),
        (["plan", "--memory", "1MiB", "--graph", "chain.graph.json"], "both --graph and --profile"),
        (["plan", "model.pt2", *PAIR, "--memory", "1MiB"], "leave out MODEL or them"),
        (["plan", "nowhere", "--memory", "1MiB"], "model nowhere does not exist"),
        (["plan", *PAIR, "--memory", "1Mib"], "--memory: '1Mib' is not a size"),
        (["plan", *PAIR, "--memory", "1MiB,"], "--memory: '' is not a size"),
        (["plan", *PAIR, "--memory", "1MiB", "--batch-sizes", "4"], "is a graph for batch 1"),
        (["plan", *PAIR, "--memory", "1MiB", "--batch-sizes", "x"], "--batch-sizes: 'x' is not a whole number"),
        (["plan", *PAIR, "--memory", "1MiB", "--time-limit", "10 parsecs"], "--time-limit: '10 parsecs'"),
        (["plan", *PAIR, "--memory", "1MiB", "--time-limit", "0s"], "--time-limit: '0'"),
        (["plan", *PAIR, "--memory", "1MiB", "--search", "magic"], "invalid choice: 'magic' (choose from 'best'"),
        (["plan", *PAIR[:3], "chain.graph.json", "--memory", "1MiB"], "chain.graph.json is a graph; "),
        (
            ["plan", *PAIR, "--memory", "10"],
            "--memory: '10' has no unit, and would be 10 bytes; write 10MiB or 10G",
        ),
        (["plan", *PAIR, "--memory", "1.5"], "--memory: '1.5' has no unit, and would be 2 bytes; write 1.5MiB"),
        (["plan", "--graph", "no", "--profile", "no", "--memory", "1MiB"], "no cannot be read: No such file"),
        (["plan", *PAIR, "--memory", "1MiB", "--output", "chain.graph.json"], "cannot be written"),
        (["show", "no.plan.json"], "no.plan.json cannot be read"),
        (["show", "chain.graph.json"], "chain.graph.json is a graph; `cohabit show` draws NAME.plan.json"),
        (["show", "chain.profile.json"], "chain.profile.json is a profile; `cohabit show` draws NAME.plan.json"),
        (["show", "x", "--html", "-", "--open"], "--open: a page on standard output"),
    ],
)
def test_wrong_commands_say_what_is_wrong(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(arguments) in (1, 2)
    shown = capsys.readouterr()
    assert says in shown.err
    assert "cohabit" in shown.err.splitlines()[-1]
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_show_finds_the_graph_and_the_profile_near_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    path = planned()
    capsys.readouterr()
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for part in ("chain, batch 1, in 28.0 KiB", "compute", "swap in", "memory", "longest stall", "gap"):
        assert part in shown.out


def test_show_takes_the_files_it_is_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = planned().rename(folder / "alone.json")
    for other in folder.glob("*.*.json"):
        other.rename(folder / "plans" / f"{other.stem}.txt")
    assert main(["show", "alone.json"]) == 2
    assert "--graph FILE" in capsys.readouterr().err
    pair = ["--graph", "plans/chain-b1.graph.json", "--profile", "plans/chain-b1.profile.json"]
    assert main(["show", str(path), *pair]) == 0


def test_show_refuses_what_was_changed(capsys: pytest.CaptureFixture[str]) -> None:
    path = planned()
    plan = cohabit.planner.plan.decode(path.read_bytes())
    assert plan.provenance is not None

    def says(raw: bytes, *more: str) -> tuple[int, str]:
        path.write_bytes(raw)
        capsys.readouterr()
        return main(["show", str(path), *more]), capsys.readouterr().err

    status, message = says(cohabit.planner.plan.encode(replace(plan, steps=plan.steps[1:])))
    assert status == 1
    assert "plan refused" in message
    status, message = says(cohabit.planner.plan.encode(replace(plan, format_version=3)))
    assert status == 1
    assert "upgrade Cohabit" in message
    status, message = says(cohabit.planner.plan.encode(plan)[:200])
    assert status == 1
    assert "truncated" in message
    other = replace(GRAPH, weights="other")
    Path("other.json").write_bytes(cohabit.planner.graph.encode(other))
    status, message = says(cohabit.planner.plan.encode(plan), "--graph", "other.json")
    assert status == 1
    assert "was made for" in message
    promise = replace(plan.provenance, latency_s=plan.provenance.latency_s / 2)
    status, message = says(cohabit.planner.plan.encode(replace(plan, provenance=promise)))
    assert status == 0
    assert "the file promises" in message


def test_show_writes_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    path = planned()
    assert main(["show", str(path), "--html", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "page.html: " in capsys.readouterr().err
    assert main(["show", str(path), "--html", "-"]) == 0
    assert capsys.readouterr().out == page
    assert page.startswith("<!doctype html>")


def test_show_opens_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) is None)
    assert main(["show", str(planned()), "--open"]) == 0
    assert opened[0].startswith("file:///")
    assert "chain, batch 1" in Path(opened[0].removeprefix("file://")).read_text()


def test_the_words_of_tables_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    path = planned()
    assert "gap: latency over the bound" in " ".join(capsys.readouterr().out.split())
    assert main(["show", str(path)]) == 0
    assert "gap: latency over the bound" in " ".join(capsys.readouterr().out.split())


def test_nonsense_in_a_profile_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, says in (
        (replace(PROFILE, op_seconds=(1.0,)), "the times of 1 ops, the graph has 4"),
        (replace(PROFILE, op_seconds=(-1.0,) * 4), "Expected `float` >= 0.0 - at `$.op_seconds[0]`"),
        (replace(PROFILE, swap_in=replace(PROFILE.swap_in, bandwidth_bytes_per_s=0.0)), "bandwidth"),
        (replace(PROFILE, swap_slowdown=0.5), "slowdown"),
        (replace(PROFILE, graph="0" * 64), "was made for 000000000000"),
    ):
        Path("chain.profile.json").write_bytes(cohabit.planner.profile.encode(wrong))
        assert main(["plan", *PAIR, "--memory", "28KiB"]) == 1
        assert says in capsys.readouterr().err


def test_a_model_is_lowered_measured_and_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    program = torch.export.export(
        model.eval(),
        (torch.zeros(2, 64),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},),
    )
    (folder / "models" / "tiny" / "1").mkdir(parents=True)
    torch.export.save(program, folder / "models" / "tiny" / "1" / "model.pt2")
    command = ["plan", "models/tiny", "--memory", "64KiB", "--cache", "cache", "--search", "on_demand"]
    assert main([*command, "--batch-sizes", "2,1"]) == 0
    assert sorted(p.name for p in Path("plans").glob("*.plan.json")) == [
        "tiny-b1-64KiB-on_demand.plan.json",
        "tiny-b2-64KiB-on_demand.plan.json",
    ]
    assert main(["show", "plans/tiny-b2-64KiB-on_demand.plan.json"]) == 0
    assert "tiny, batch 2, in 64.0 KiB" in capsys.readouterr().out
    assert main([*command, "--batch-sizes", "1,100"]) == 2
    assert "--batch-sizes: tiny was not exported for batch 100" in capsys.readouterr().err


def test_a_model_s_own_configuration_is_planned_as_it_is_served(folder: Path) -> None:
    path = folder / "models" / "wide" / "1" / "model.pt2"
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, path)
    (path.parents[1] / "config.pbtxt").write_text(
        "max_batch_size: 4 parameters { key: 'weights' value { string_value: 'bfloat16' } }"
    )
    assert main(["plan", "models/wide", "--memory", "1MiB", "--cache", "cache", "--search", "on_demand"]) == 0
    (written,) = Path("plans").glob("wide*.graph.json")
    graph = cohabit.planner.graph.decode(written.read_bytes())
    assert {t.codec for t in graph.tensors if t.kind == "parameter"} == {"bfloat16"}


def test_a_share_of_the_weights_counts_tables_of_the_host_store_as_serving_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "models" / "tied" / "1" / "model.pt2"
    models.export(models.Tied(), {"tokens": torch.zeros(3, 5, dtype=torch.int64)}, path)
    assert main(["plan", "models/tied", "--memory", "50%", "--cache", "cache", "--search", "on_demand"]) == 0
    planned = capsys.readouterr().out
    assert main(["check", "models/tied", "--memory", "50%", "--cache", "cache", "--batch-sizes", "1"]) == 0
    weights = re.search(r"weights +([0-9.]+ .iB): ([0-9.]+ .iB) can be swapped", capsys.readouterr().out)
    assert weights is not None
    assert weights[1] != weights[2], "the model has a table"
    assert f"tied, {weights[1]} of weights" in planned


def test_models_are_found_by_their_folder_or_file(folder: Path) -> None:
    path = folder / "models" / "tiny" / "2" / "model.pt2"
    path.parent.mkdir(parents=True)
    path.touch()
    (folder / "other.pt2").touch()
    assert (find(folder / "models" / "tiny").name, find(path).name) == ("tiny", "tiny")
    assert find(path).version == 2
    assert find(folder / "other.pt2").name == "other"
    with pytest.raises(RepositoryError, match=r"is a repository; give one of its models, such as .*tiny"):
        find(folder / "models")
    with pytest.raises(RepositoryError, match="is not a model"):
        find(folder)


def test_progress_line_says_how_good_the_best_plan_is() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, force_terminal=True)
    progress = SearchProgress(console)
    progress.doing("resnet50")
    progress.searched(42, 0.0123, 0.0100)
    console.print(progress)
    assert "resnet50  best 12.30 ms  bound 10.00 ms  gap 23.0 %  42 evaluations  0 s" in console.export_text()


def test_numbers_are_written_for_people() -> None:
    assert [milliseconds(s) for s in (1e-6, 0.0123, 0.123, 1.5)] == ["0.001 ms", "12.30 ms", "123.0 ms", "1500 ms"]
    assert [round_time(s) for s in (0.0, 2e-4, 0.05)] == ["0", "0.2 ms", "50 ms"]
    assert (gap(1.1, 1.0), gap(1.0, 0.0), percent(20.0)) == ("10.0 %", "-", "2000 %")
    assert (shortened("layer.weight", 20), shortened("encoder.layers.11.weight", 10)) == (
        "layer.weight",
        "…11.weight",
    )


def test_ticks_are_round_and_few() -> None:
    assert nice_ticks(0.305, 8) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    assert nice_ticks(0.0, 8) == [0.0]
    for end in (1e-6, 0.0034, 1.0, 7.0, 99.0, 12345.0):
        ticks = nice_ticks(end, 8)
        assert 3 <= len(ticks) <= 9
        assert ticks[-1] <= end * (1 + 1e-9)


def test_help_names_every_searcher(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "show"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert "examples:" in printed
        if command == "plan":
            assert all(name in printed for name in (*registry.SEARCHERS, *registry.BASELINES))


def test_tile_names_every_search_of_tilings() -> None:
    assert set(SEARCH_NAMES) == SEARCHES.keys()

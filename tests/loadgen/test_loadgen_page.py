"""`loadgen report`: what the page says of runs, and of two of them."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.cli import main
from cohabit.loadgen.drawing.latencies import differences
from cohabit.loadgen.drawing.page import load_report, write_page
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.openloop import Outcome
from cohabit.loadgen.report import (
    Report,
    RunDescription,
    make_report,
    print_report,
    read_reports,
    remarks,
    write_reports,
)
from cohabit.page.document import Alternatives, FactTable

pytestmark = pytest.mark.process


def run_of(
    mean_s: float, seed: int, rate_per_s: float = 100.0, model: str = "a", duration_s: float = 30.0
) -> Report:
    rng = np.random.default_rng(seed)
    run = RunDescription(url="u", rate_per_s=rate_per_s, duration_s=duration_s, warmup_s=0.0)
    arrivals = [RequestArrival(k / rate_per_s, model) for k in range(int(duration_s * rate_per_s))]
    return make_report(run, [Outcome(a, 0.0, 0.001 + float(rng.exponential(mean_s))) for a in arrivals], [model])


def test_a_slower_run_is_clearly_slower_at_every_percentile() -> None:
    rows = differences(run_of(0.010, seed=0), run_of(0.020, seed=1))
    assert [row.name for row in rows] == ["p50", "p90", "p99", "p99.9"]
    for row in rows[:3]:
        assert row.is_clear
        assert row.low_s <= row.other_s - row.first_s <= row.high_s


def test_nothing_is_said_of_few_requests_or_invalid_runs() -> None:
    rows = differences(run_of(0.010, seed=0), run_of(0.020, seed=1))  # 3,000 requests: p99.9 is of three
    assert [row.undecided for row in rows] == ["", "", "", "too few requests"]
    assert not rows[-1].is_clear
    late = msgspec.structs.replace(run_of(0.020, seed=1), send_lag=run_of(1.0, seed=2).latency)
    rows = differences(run_of(0.010, seed=0), late)
    assert all(row.undecided == "a run is invalid" and not row.is_clear for row in rows)


def test_intervals_of_equal_servers_contain_zero_about_as_often_as_they_claim() -> None:
    runs = [run_of(0.01, seed, duration_s=10.0) for seed in range(40)]
    clear = [differences(*pair)[0].is_clear for pair in zip(runs[::2], runs[1::2], strict=True)]
    assert sum(map(bool, clear)) <= 5, "5 % of 20 are one"


def test_a_page_is_one_file_and_ends_no_script_early(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(page, {"one": [run_of(0.01, 0, model="</script><b>")], "two": [run_of(0.02, 1)]})
    text = page.read_text()
    assert text.count("</script>") == 2, "the data's and the page's own"
    assert re.findall(r'(?:src|href)="([^"]*)|@import|url\(', text) == ["data:,"], "nothing else is loaded"


def test_the_page_has_every_sentence_of_the_terminal_below_the_load_that_it_is_about() -> None:
    tight = {"slo_s": 0.02, "slo_percentile": 99.0}
    lag = run_of(1.0, seed=2).latency
    runs = [
        msgspec.structs.replace(run_of(0.01, 0, 50.0), **tight),
        msgspec.structs.replace(run_of(0.01, 1, 100.0), **tight, send_lag=lag),
    ]
    alone = [msgspec.structs.replace(run_of(0.01, 2, 100.0), concurrency=4)]
    document = load_report({"swept": runs, "closed": alone})
    (choice,) = (section for section in document.sections if isinstance(section, Alternatives))
    assert choice.names == ["50/s", "100/s", "closed loop of 4"]
    for load, sections, (name, run) in zip(
        choice.names, choice.sections, [("swept", runs[0]), ("swept", runs[1]), ("closed", alone[0])], strict=True
    ):
        text = msgspec.json.encode(sections).decode()
        tables = [section.title for section in sections if isinstance(section, FactTable)]
        assert tables == [f"Results: {name}, {load}", f"Models: {name}, {load}"], "no other run is shown"
        console = Console(file=io.StringIO(), width=1000)
        print_report(run, console)
        told = console.file.getvalue().splitlines()[-len(remarks(run)) :]  # type: ignore[attr-defined]
        assert told == [remark.words for remark in remarks(run)]
        assert all(msgspec.json.encode(words).decode() in text for words in told)
    assert [notice[0] for notice in document.notices if "invalid" in str(notice[0])]
    rows = next(section for section in document.sections if isinstance(section, FactTable)).rows
    assert [row[-1] for row in rows] == ["meets the SLO", "invalid", ""]


def test_reports_are_drawn_from_their_files(tmp_path: Path) -> None:
    write_reports(tmp_path / "a.json", [run_of(0.01, 0, 50.0), run_of(0.01, 1)], as_list=True)
    write_reports(tmp_path / "b.json", [run_of(0.02, 2)], as_list=False)
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["report", *files, "--html", str(tmp_path / "p.html")]) == 0
    assert "b compared with a, 100/s" in (tmp_path / "p.html").read_text()
    assert [report.rate_per_s for report in read_reports(tmp_path / "a.json")] == [50.0, 100.0]


@pytest.mark.parametrize("write", [lambda path: path.write_text("{}"), lambda path: None])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "x.json")
    with pytest.raises(UsageError, match="is not a report of this version of loadgen"):
        read_reports(tmp_path / "x.json")

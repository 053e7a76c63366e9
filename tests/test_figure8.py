"""The CPU's Figure 8: its table and its picture, of reports that are made up."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks import figure8, record, scrape
from benchmarks.figure8 import Point
from benchmarks.scrape import Running
from cohabit.loadgen.errors import ServerFailed
from cohabit.loadgen.report import ModelReport, Report, Spread
from cohabit.loadgen.run import Load
from cohabit.planner.sizing.problem import LayoutName


def point(layout: LayoutName, rate_per_s: float, p99_s: float | None) -> Point:
    """Two rounds of ten requests, of which eight are answered, six in time; none without a p99."""
    completed = 0 if p99_s is None else 8
    spread = None if p99_s is None else Spread(0.01, 0.01, p99_s, p99_s, p99_s, p99_s, p99_s)
    model = ModelReport("a", 10, completed, {}, min(completed, 6), spread)
    report = Report(
        url="", seed=0, batch=1, rate_per_s=rate_per_s, duration_s=1.0, warmup_s=0.0, slo_s=0.1, sent=10,
        completed=completed, achieved_per_s=8.0, goodput_per_s=6.0, latency=spread, send_lag=None, errors={},
        error_examples={}, models=(model,),
    )  # fmt: skip
    counted = defaultdict(float, {"nv_inference_count": 20, figure8.COPIED: 20 << 20, figure8.COMPUTED: 0.05})
    return Point(layout, rate_per_s, [report, report], counted)


def test_each_point_is_compared_with_the_resident_one_of_its_rate() -> None:
    points = [
        point("resident", 50, 0.02),
        point("lru", 50, 0.05),
        point("lru", 100, 0.5),
        point("pipelined", 50, None),
    ]
    rows = [list(row.values()) for row in figure8._rows(points)]
    assert rows[0][5] == ""
    assert rows[1] == ["lru, 50", "80%", "60%", "10.0", "50.0", "2.500 (2.500 - 2.500)", "1.00", "2.50"]
    assert rows[2][5] == ""
    assert rows[3][:2] == ["pipelined, 50", "0%"]


def test_a_layout_that_cannot_start_is_a_note_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def serving(command: Sequence[str]) -> AsyncIterator[Running]:
        layout, memory = (command[command.index(flag) + 1] for flag in ("--layout", "--memory"))
        if layout == "lru":
            raise ServerFailed("the server exited\ncohabit: big: holding all parameters at once needs more")
        assert memory == ("100%" if layout == "resident" else "0B"), "25 % of no prepared models"
        yield Running("", "")

    async def made_up(url: str, load: Load) -> Report:
        return point("lru", load.rate_per_s, 0.02).reports[0]

    monkeypatch.setattr(figure8, "serving", serving)
    monkeypatch.setattr(figure8, "run_load", made_up)
    monkeypatch.setattr(scrape, "by_model", lambda url, name: {"a": 1.0})
    monkeypatch.setattr(figure8, "prepare_visibly", lambda *_, **__: [])
    monkeypatch.setattr(record, "results_folder", lambda: tmp_path)
    assert figure8.main(["--record", "--folder", str(tmp_path)]) == 1
    written = (tmp_path / "figure8.md").read_text()
    assert "lru: cohabit: big: holding all parameters" in written
    assert all(f"| {layout}, 100 |" in written for layout in figure8.LAYOUTS if layout != "lru")
    assert (tmp_path / "figure8.png").stat().st_size > 1000

"""A system without huge pages is told about, once per arena."""

import logging
from pathlib import Path

import pytest

from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.stores import pages


@pytest.mark.parametrize(
    ("setting", "warns"), [("always madvise [never]\n", True), ("always [madvise] never\n", False), (None, False)]
)
def test_an_arena_warns_where_huge_pages_are_off(
    setting: str | None,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "cohabit.runtime")
    monkeypatch.setattr(pages, "HUGE_PAGES_SETTING", tmp_path / "enabled")
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
    CpuBackend().arena(4096).close()
    assert [r.message for r in caplog.records if "huge pages" in r.message] == [
        "copies and reads of parameters take longer without huge pages"
    ] * warns

"""CPUs near a device, as Linux lists them, and the thread that runs on them while it touches pages."""

import os
import threading
from pathlib import Path

import pytest

from cohabit.runtime.stores.numa import local_cpus, running_on


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("what\n", set())]
)
def test_the_cpus_of_a_pci_device_are_read_by_its_address(text: str, cpus: set[int], tmp_path: Path) -> None:
    folder = tmp_path / "0001:0a:1f.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(text)
    assert local_cpus(1, 10, 31, tmp_path) == cpus
    assert local_cpus(0, 10, 31, tmp_path) == set(), "a device that the system does not show"


def test_only_the_calling_thread_runs_near_and_only_inside_of_the_block() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    with running_on(one | {10_000}):
        assert os.sched_getaffinity(0) == one
        assert os.sched_getaffinity(threading.get_native_id()) == one
        with pytest.raises(RuntimeError, match="stays there"), running_on(one):
            raise RuntimeError("stays there")
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cpus", [frozenset[int](), frozenset({10_000})])
def test_a_thread_stays_where_it_may_run(cpus: frozenset[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the device, or the process may not use its CPUs, or all of its CPUs are near."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("it was moved"))
    for given in (cpus, frozenset(os.sched_getaffinity(0))):
        with running_on(given):
            pass

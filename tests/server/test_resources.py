"""The CPUs that a process may use, in cgroups of both versions, and the memory that --process-memory counts."""

import os
import re
from pathlib import Path

import pytest

from cohabit.server.config.config import ServeConfig, decode_config, encode_config
from cohabit.server.config.sizes import FixedSize
from cohabit.server.errors import ConfigError
from cohabit.server.placement import process_memory
from cohabit.server.resources import available_cpus, resident_bytes

MACHINE = 64


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MACHINE)))


def counted(folder: Path, of_process: str, files: dict[str, str]) -> int:
    (folder / "of_process").write_text(of_process)
    for name, content in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return available_cpus(folder / "of_process", folder / "mounted")


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        ("0::/a/b\n", {}, MACHINE),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, MACHINE),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        (
            "3:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"},
            MACHINE,
        ),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu:/of/host\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("4:memory:/a\n", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, MACHINE),
        ("0::/\n", {"cpu.max": "damaged\n"}, MACHINE),
    ],
)
def test_a_quota_counts_where_it_is_less_than_the_machine(
    of_process: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert counted(tmp_path, of_process, files) == expected


def test_the_affinity_mask_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    assert counted(tmp_path, "0::/\n", {"cpu.max": "800000 100000\n"}) == 3


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path / "missing", tmp_path) == MACHINE


def test_resident_memory_grows_with_what_is_written() -> None:
    before = resident_bytes()
    block = bytearray(b"1" * (64 << 20))
    assert resident_bytes() - before > 60 << 20
    assert len(block) == 64 << 20


def test_the_front_end_counts_as_it_was_when_the_server_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine would find less and less room beside a front end that grows."""
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 100 << 20)
    started = ServeConfig(Path("models"), FixedSize(1), queue_bytes=1 << 20, frontend_bytes=50 << 20)
    config = decode_config(encode_config(started))
    measured = process_memory.measure_process_memory(400 << 20, [], config)
    assert measured.base_bytes == 150 << 20
    assert measured.models_bytes == (400 - 150 - 1 - 18) // 4 * 4 << 20


@pytest.mark.parametrize("queue_bytes", [None, 3 << 20])
def test_the_size_that_a_refusal_names_is_enough(queue_bytes: int | None) -> None:
    def measured(limit_bytes: int) -> process_memory.ProcessMemory:
        return process_memory.ProcessMemory(limit_bytes, 600 << 20, 0, queue_bytes or limit_bytes // 16)

    with pytest.raises(ConfigError, match="is not enough") as refused:
        measured(200 << 20).require(9 << 20)
    least = re.search(r"give at least (\d+)MiB", str(refused.value))
    assert least is not None
    measured(int(least[1]) << 20).require(9 << 20)
    with pytest.raises(ConfigError, match="is not enough"):
        measured((int(least[1]) - 3) << 20).require(9 << 20)

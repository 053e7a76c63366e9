"""What a process may use, in cgroups of both versions; settings that ask for more; what --process-memory counts."""

import ctypes
import logging
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.devices import open_device
from cohabit.runtime.stores.pages import release_code_pages
from cohabit.server.cli import main
from cohabit.server.config import machine as machine_module
from cohabit.server.config.config import ServeConfig, decode_config, encode_config
from cohabit.server.config.machine import (
    available_cpus,
    available_memory,
    memory_kills,
    memory_left,
    refuse_impossible,
    resident_bytes,
)
from cohabit.server.config.sizes import FixedSize
from cohabit.server.deploy import decide, prepare
from cohabit.server.deploy.prepare import TimeLeft, open_backend
from cohabit.server.errors import ConfigError
from cohabit.server.file_state import FileState
from cohabit.server.repository.sources import ModelSource
from tests.support.runtime.cuda_fake import FakeDriver

pytestmark = pytest.mark.process

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


def test_half_of_the_cgroup_s_memory_is_pinned_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory counts in the cgroup and cannot be reclaimed: half of the machine's would end a small container."""
    monkeypatch.setattr(CudaDriver, "open", lambda index: FakeDriver())
    monkeypatch.setattr(prepare, "available_memory", lambda: (3 << 30, "this process's cgroup"))
    monkeypatch.setattr(prepare, "set_up_torch", lambda config: None)
    with closing(open_backend(ServeConfig(Path("models"), FixedSize(1 << 30), device="cuda:0"))) as backend:
        assert isinstance(backend, CudaBackend)
        assert backend.pinned_memory.limit_bytes == 3 << 29
    with closing(open_device("cuda")) as alone:
        assert isinstance(alone, CudaBackend)
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert alone.pinned_memory.limit_bytes == machine_bytes // 2


def test_resident_memory_grows_with_what_is_written() -> None:
    """In a process of its own: what other tests left behind may be freed meanwhile."""
    program = (
        "from cohabit.server.config.machine import resident_bytes\n"
        "before = resident_bytes()\n"
        "block = bytearray(b'1' * (64 << 20))\n"
        "print(resident_bytes() - before)\n"
    )
    grown = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert 60 << 20 < grown < 200 << 20


def test_code_that_only_an_import_needs_is_released() -> None:
    """In a process of its own. It goes on computing: what it needs is read again."""
    program = (
        "import torch\n"
        "from cohabit.runtime.stores.pages import release_code_pages\n"
        "from cohabit.server.config.machine import resident_bytes\n"
        "before = resident_bytes()\n"
        "release_code_pages()\n"
        "released = before - resident_bytes()\n"
        "assert (torch.ones(3, 3) @ torch.ones(3, 3)).sum() == 27\n"
        "print(released)\n"
    )
    released = int(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    )
    assert released > 40 << 20


def test_code_that_was_changed_in_memory_is_kept(tmp_path: Path) -> None:
    """As a debugger or a profiler changes it: the file does not have these bytes."""
    (tmp_path / "library").write_bytes(b"file" * mmap.PAGESIZE)
    libc = ctypes.CDLL(None)
    with (
        (tmp_path / "library").open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped,
    ):
        mapped[:7] = b"changed"
        view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        assert libc.mprotect(view, ctypes.c_size_t(len(mapped)), mmap.PROT_READ | mmap.PROT_EXEC) == 0
        release_code_pages()
        kept = mapped[:7]
        del view
    assert kept == b"changed"


def test_the_front_end_counts_as_it_was_when_the_server_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine would find less and less room beside a front end that grows."""
    monkeypatch.setattr(decide, "resident_bytes", lambda: 100 << 20)
    started = ServeConfig(Path("models"), FixedSize(1), queue_bytes=1 << 20, frontend_bytes=50 << 20, store="file")
    config = decode_config(encode_config(started))
    measured = decide.measure_process_memory(400 << 20, [], config)
    assert measured.base_bytes == 150 << 20
    assert measured.models_bytes == (400 - 150 - 1 - 44) // 4 * 4 << 20


def activations(nbytes: int) -> SimpleNamespace:
    """A model with 16 MiB of parameters and one op, whose input has so many bytes."""
    tensors = Tensor("w", 16 << 20, "parameter"), Tensor("x", nbytes, "input"), Tensor("y", 0, "activation")
    graph = Graph("one", 1, "0" * 64, tensors, (Op("op", "linear", (0, 1), (2,)),), (2,))
    return SimpleNamespace(demand=SimpleNamespace(graphs={1: graph}), parameter_bytes=16 << 20)


@pytest.mark.parametrize(
    ("sizes", "partitions", "workspace", "kept"),
    [
        (
            (1, 9),
            (8, 8),
            12,
            10.0,
        ),  # the other's copies fill the workspace, but for the 1 MiB of its own activations
        ((1, 9), (8, 16), 12, 10.0),
        ((1, 9), (16, 8), 12, 0.0),  # only the model with the most activations streams
        ((1, 9), (16, 16), 12, 0.0),
        ((1, 90), (8, 8), 11, 12.5),  # offloaded: no more than the workspace is in memory
        ((9,), (8,), 12, 0.0),
    ],
)
def test_activations_count_beside_a_workspace_that_other_models_stream_through(
    sizes: Sequence[int], partitions: Sequence[int], workspace: int, kept: float
) -> None:
    decider: Any = SimpleNamespace(_config=SimpleNamespace(compute_lanes=1))
    division: Any = SimpleNamespace(
        partition_bytes=[nbytes << 20 for nbytes in partitions], workspace_bytes=workspace << 20
    )
    families: list[Any] = [[activations(nbytes << 20)] for nbytes in sizes]
    assert decide.Decider._kept_bytes(decider, families, division) == kept * (1 << 20)
    measured = decide.ProcessMemory(400 << 20, 100 << 20, 0, 0, kept_bytes=int(kept) << 20)
    assert measured.models_bytes == (400 - 100 - 44 - int(kept)) // 4 * 4 << 20


@pytest.mark.parametrize("filled_share", [0.0, 0.5, 1.0])
def test_a_loaded_server_counts_its_memory_again_with_the_arena_full(
    filled_share: float, caplog: pytest.LogCaptureFixture
) -> None:
    nbytes, frontend_bytes = 128 << 20, 50 << 20
    with CpuArena(nbytes) as arena:
        if filled := int(nbytes * filled_share):
            arena.bytes(0, filled)[:] = 1
        parts = decide.ProcessMemory(8 << 30, 0, 0, 3 << 20, state_bytes=2 << 20, kept_bytes=1 << 20)
        most_bytes = parts.most_bytes(arena, frontend_bytes)
        warned = [warnings_of_memory(arena, parts, frontend_bytes, limit, caplog) for limit in (1 << 20, 1 << 50)]
        arena.bytes(0, nbytes)[:] = 1
        measured = resident_bytes()
    assert abs(most_bytes - (measured + frontend_bytes + (44 + 3 + 2 + 1 << 20))) < 8 << 20
    assert warned == [1, 0]


def warnings_of_memory(
    arena: CpuArena,
    parts: decide.ProcessMemory,
    frontend_bytes: int,
    limit_bytes: int,
    caplog: pytest.LogCaptureFixture,
) -> int:
    caplog.clear()
    decider: Any = SimpleNamespace(
        _memory=SimpleNamespace(arena=arena),
        _process_memory=replace(parts, limit_bytes=limit_bytes),
        _config=SimpleNamespace(frontend_bytes=frontend_bytes),
        _bundle=None,
    )
    decide.Decider.warn_of_process_memory(decider)
    return len([record for record in caplog.records if "may take more memory" in record.getMessage()])


@pytest.mark.parametrize("queue_bytes", [None, 3 << 20])
def test_the_size_that_a_refusal_names_is_enough(queue_bytes: int | None) -> None:
    def measured(limit_bytes: int) -> decide.ProcessMemory:
        return decide.ProcessMemory(limit_bytes, 600 << 20, 0, queue_bytes or limit_bytes // 16)

    with pytest.raises(ConfigError, match="is not enough") as refused:
        measured(200 << 20).require(9 << 20)
    least = re.search(r"at least (\d+)MiB", str(refused.value))
    assert least is not None
    measured(int(least[1]) << 20).require(9 << 20)
    with pytest.raises(ConfigError, match="is not enough"):
        measured((int(least[1]) - 3) << 20).require(9 << 20)


PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, (PHYSICAL, "this machine")),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "65536\n"}, (65536, "this process's cgroup")),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "8192\n"}, (8192, "this process's cgroup")),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, (PHYSICAL, "this machine")),
    ],
)
def test_memory_is_the_machines_or_less_in_a_cgroup(
    of_process: str, files: dict[str, str], expected: tuple[int, str], tmp_path: Path
) -> None:
    counted(tmp_path, of_process, files)
    assert available_memory(tmp_path / "of_process", tmp_path / "mounted") == expected


def test_more_memory_than_there_is_ends_the_start_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["serve", str(tmp_path), "--cache", str(tmp_path / "cache")]
    for flag in ("--memory", "--process-memory"):
        assert main([*command, flag, "900TiB"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert (
            f"cohabit: {flag}: 921600.00 GiB is more than the {format_bytes(available_memory()[0])} of RAM" in said
        )
        assert said.endswith(
            "give less, or a share of the weights such as 25%" if flag == "--memory" else "give less"
        )


def test_a_cache_that_cannot_be_written_ends_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    command = ["serve", str(tmp_path), "--memory", "1MiB", "--cache", str(file / "cache")]
    assert main(command) == 2
    assert f"cohabit: --cache: {file}/cache cannot be written: Not a directory" in capsys.readouterr().err


def test_more_threads_than_cpus_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings(threads: int | None, lanes: int) -> list[logging.LogRecord]:
        caplog.clear()
        size = FixedSize(1 << 20)
        config = ServeConfig(Path("models"), size, cache=tmp_path, threads=threads, compute_lanes=lanes)
        refuse_impossible(config, {"memory": "--memory", "cache": "--cache"})
        return caplog.records

    cpus = available_cpus()
    assert warnings(None, 1) == warnings(cpus, 1) == []
    (record,) = warnings(cpus, 2)
    assert "--threads" in record.getMessage()
    assert record.fields == {"threads": cpus, "compute_lanes": 2, "cpus": cpus}  # type: ignore[attr-defined]


def test_no_time_is_estimated_from_a_small_model_alone() -> None:
    now_s = 0.0
    sizes = {"small": 1, "large": 600, "larger": 1000}
    sources = {
        name: ModelSource(name, 1, Path(name), state=FileState(0, nbytes, 0)) for name, nbytes in sizes.items()
    }
    progress = TimeLeft(list(sources.values()), lambda: now_s)
    now_s = 1.0
    assert progress.left == ""
    progress.done(sources["small"])
    assert progress.left == ", 1 of 3 done"
    now_s = 6.0
    progress.done(sources["large"])
    assert progress.left == ", 2 of 3 done, about 10 s left"


def left(folder: Path, of_process: str, available_kib: int, files: dict[str, str]) -> tuple[int, str]:
    (folder / "of_process").write_text(of_process)
    (folder / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    for name, content in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return memory_left(folder / "of_process", folder / "mounted", folder / "meminfo")


def test_memory_that_is_left_is_what_the_machine_or_the_cgroup_leaves_but_a_sixteenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "available_memory", lambda *where: (64 << 30, "this machine"))
    monkeypatch.setattr(machine_module, "resident_bytes", lambda: 128 << 20)
    mib = 1 << 20
    group = {
        "a/memory.max": str(1024 * mib),
        "a/memory.current": str(400 * mib),
        "a/memory.stat": "inactive_file 0\n",
    }
    cached = group | {"a/memory.stat": f"anon 7\ninactive_file {144 * mib}\n"}
    plenty, machine, cgroup = 32 << 20, "this machine", "the cgroup of this process"
    assert left(tmp_path, "0::/\n", 896 << 10, {}) == (960 * mib, machine), "its own 128 MiB count as left"
    assert left(tmp_path, "0::/a\n", plenty, group) == (704 * mib, cgroup), "the others' 272 MiB do not"
    assert left(tmp_path, "0::/a\n", plenty, cached) == (832 * mib, cgroup), "a cache of files can be dropped"
    assert left(tmp_path, "0::/a\n", 384 << 10, cached) == (480 * mib, machine)
    own = {f"memory/a/memory.{name}": text for name, text in (("limit_in_bytes", str(512 * mib)), ("stat", ""))}
    first = own | {"memory/a/memory.usage_in_bytes": str(128 * mib)}
    assert left(tmp_path, "4:memory:/a\n", plenty, first) == (480 * mib, cgroup)
    assert left(tmp_path, "0::/\n", 0, {}) == (112 * mib, machine)


@pytest.mark.parametrize(
    ("of_process", "files", "kills"),
    [
        ("0::/a/b\n", {"a/b/memory.events": "low 0\noom 3\noom_kill 2\n", "a/memory.events": "oom_kill 9\n"}, 2),
        ("4:memory:/a\n", {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),
        ("4:memory:/a\n", {"memory/a/memory.oom_control": "under_oom 0\n"}, 0),
        ("0::/a\n", {}, 0),
    ],
)
def test_what_the_kernel_has_ended_for_lack_of_memory_is_counted(
    of_process: str, files: dict[str, str], kills: int, tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    for name, text in files.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(text)
    (tmp_path / "cgroup").write_text(of_process)
    assert memory_kills(tmp_path / "cgroup", mounted) == kills

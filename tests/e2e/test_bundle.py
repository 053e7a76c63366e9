"""Bundles: exported by the command, served without archives, worker processes or searches, with the same bits."""

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from cohabit.planner import cache_file
from cohabit.planner.errors import CohabitError
from cohabit.planner.profile import decode
from cohabit.server.cli import main
from cohabit.server.config.bundle import read_bundle
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sources import add_flags, read_settings
from cohabit.server.errors import ConfigError, StartFailed
from tests.support.e2e.machine import as_root, memory_cgroup
from tests.support.e2e.serving import (
    QUICK_SEARCH,
    KeptProcesses,
    Running,
    infer,
    process,
    refused_start,
    repository_index,
    serving,
)
from tests.support.e2e.stacks import WEIGHTS_MIB, Stacks, X, answer, is_answer_of
from tests.support.server.ensembles import config_text, put, step, tensor

MODELS, BATCHES = "abc", "1,2"
SEARCH = ("--search", QUICK_SEARCH)
MEMORY = "8MiB"


def settings(*flags: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_settings(parser.parse_args(flags), {}).config


@contextmanager
def serving_bundle(folder: Path) -> Iterator[Running]:
    config = settings(str(folder))
    changes = {key: getattr(config, key) for key in ("bundle", "store", "batch_sizes", "pack_weights")}
    with serving(config.repository, MEMORY, config.cache or Path(), **changes) as server:
        yield server


@pytest.fixture(scope="module")
def repository(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundled") / "models"
    for seed, name in enumerate(MODELS):
        stacks.put(root, name, seed)
    config = (
        'name: "a" max_batch_size: 2 output { name: "out" data_type: TYPE_FP32 dims: 512 label_filename: "labels" }'
    )
    (root / "a" / "config.pbtxt").write_text(config)
    (root / "a" / "labels").write_text("first\nsecond")
    (root / "b" / "tokenizer.json").write_text("a tokenizer")
    tensors = tensor("input", "X", dims="512") + tensor("output", "Y", dims="512")
    head = "platform: 'ensemble' max_batch_size: 2\n"
    put(root, "ensemble", config_text(tensors, step("a", {"x": "X"}, {"out": "Y"}), head=head))
    return root


@pytest.fixture(scope="module")
def exported(repository: Path, plans: Path) -> Path:
    output = repository.parent / "bundle"
    flags = ("--memory", MEMORY, "-o", str(output), "--cache", str(plans), "--batch-sizes", BATCHES, *SEARCH)
    assert main(["export-bundle", str(repository), *flags]) == 0
    return output


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    """A copy, at another place."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def test_a_bundle_gives_the_bits_of_resident_models(
    repository: Path, plans: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptProcesses, "kept", [])
    before = multiprocessing.active_children()
    changes = {"layout": "resident", "batch_sizes": (1, 2), "store": "file"}
    with serving(repository, "400%", plans, **changes) as resident:
        wanted = {name: answer(resident, name) for name in MODELS}
    with serving_bundle(bundle) as server:
        assert not server.replanner.is_busy
        assert set(multiprocessing.active_children()) <= set(before), "nothing is searched for"
        residents = sum(placed.footprint.resident_bytes for placed in server.placement.models.values())
        assert residents < len(MODELS) * WEIGHTS_MIB << 20
        for name in (*MODELS, *MODELS):
            np.testing.assert_array_equal(answer(server, name), wanted[name])
        np.testing.assert_array_equal(infer(server.address, "ensemble", {"X": X})["Y"], wanted["a"])
        assert server.placement.models["a", 1].servable.info.outputs[0].labels == ("first", "second")


def test_a_bundle_has_the_tokenizers_of_its_models(exported: Path) -> None:
    found = [path.relative_to(exported) for path in exported.rglob("tokenizer.json")]
    assert found == [Path("models/b/tokenizer.json")]


def test_a_bundle_is_served_by_a_process_that_cannot_prepare(bundle: Path) -> None:
    assert not list(bundle.rglob("*.pt2"))
    script = f"""
import argparse, asyncio, multiprocessing, sys
import cohabit.server.process.engine_process
from cohabit.server.config.sources import add_flags, read_settings
from cohabit.server.process.engine import Engine

async def start():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    engine = Engine(read_settings(parser.parse_args([{str(bundle)!r}]), {{}}).config, lambda entry: None)
    print(await engine.start())
    assert not multiprocessing.active_children()
    await engine.stop()

if __name__ == "__main__":
    asyncio.run(start())
    tops = {{name.partition(".")[0] for name in sys.modules}}
    heavy = tops & {{"numba", "llvmlite", "scipy", "transformers", "grpc", "rich", "aiohttp"}}
    heavy |= sys.modules.keys() & {{"torch._dynamo", "torch._export.serde.serialize", "torch._inductor"}}
    searches = tuple(f"cohabit.planner.{{room}}" for room in ("genetic", "search", "streaming", "papers"))
    heavy |= {{name for name in sys.modules if name.startswith(searches)}}
    assert not heavy, heavy
"""
    path = bundle.parent / "start.py"
    path.write_text(script)
    before = {p: p.stat().st_mtime_ns for p in bundle.rglob("*")}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "partition" in done.stdout
    assert {p: p.stat().st_mtime_ns for p in bundle.rglob("*")} == before, (
        "it may lie on a medium that is read-only"
    )


def test_damage_to_a_model_names_the_file_and_the_others_are_served(bundle: Path) -> None:
    written = read_bundle(bundle)
    archives = {model.name: model.archive for model in written.models}
    (cut,) = (bundle / "cache" / "weights").glob(f"{archives['a'][:32]}*/weights-*.bin")
    os.truncate(cut, cut.stat().st_size - 4096)
    with serving_bundle(bundle) as server:
        found = repository_index(server.address)
        name = f"{cut.relative_to(bundle)} has {cut.stat().st_size} bytes instead of {cut.stat().st_size + 4096}"
        assert name in found["a"]["reason"]
        assert "copy or export the bundle again" in found["a"]["reason"]
        assert is_answer_of(1, answer(server, "b"))
        assert is_answer_of(2, answer(server, "c"))


def test_weights_that_are_cut_off_fail_their_model_alone_until_they_are_back(bundle: Path) -> None:
    models = read_bundle(bundle).models
    cut = next(model for model in models if model.partition_bytes < model.weight_bytes)
    (path,) = (bundle / "cache" / "weights").glob(f"{cut.archive[:32]}*/weights-*.bin")
    whole = path.read_bytes()
    with serving_bundle(bundle) as server:
        right = {model.name: answer(server, model.name) for model in models}
        os.truncate(path, 4096)
        for _ in range(2):
            with pytest.raises(InferenceServerException, match=r"segment .* was changed after it was loaded"):
                answer(server, cut.name)
            for other in right.keys() - {cut.name}:
                assert np.array_equal(answer(server, other), right[other])
        path.write_bytes(whole)
        assert np.array_equal(answer(server, cut.name), right[cut.name])


@pytest.mark.parametrize("part", ["plans", "profiles", "weights"])
def test_a_missing_part_is_named(bundle: Path, part: str) -> None:
    shutil.rmtree(bundle / "cache" / part)
    with pytest.raises(CohabitError, match=rf"cache/{part}/.* is missing"), serving_bundle(bundle):
        pass


def test_another_machine_is_refused_with_both_names(bundle: Path) -> None:
    path = bundle / "bundle.json"
    machine = read_bundle(bundle).machine
    path.write_text(path.read_text().replace(machine, "Cortex-A76, torch 2.9"))
    with (
        pytest.raises(ConfigError, match=r"was exported for Cortex-A76, torch 2\.9; this machine has") as refusal,
        serving_bundle(bundle),
    ):
        pass
    assert machine in str(refusal.value)
    assert "export-bundle" in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--memory", "6MiB"),
            "--memory: the bundle was exported for --memory 8MiB, not 6MiB; leave it out, or run",
        ),
        (("--batch-sizes", "4"), "--batch-sizes: the bundle was exported for --batch-sizes 1,2, not 4"),
        (("--model-control-mode", "explicit"), "--model-control-mode: the bundle was exported for"),
    ],
)
def test_settings_without_plans_are_refused(exported: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings(str(exported), *flags)
    assert str(refusal.value).startswith(message)
    assert settings(str(exported), "--memory", "8192KiB").bundle == exported, "the same, written otherwise"


def test_an_unreadable_manifest_is_named(bundle: Path) -> None:
    path = bundle / "bundle.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"bundle\.json is damaged"):
        settings(str(bundle))


def test_a_bundle_is_planned_with_the_link_that_is_given(
    repository: Path, plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not resident takes at least the time of its bytes."""
    output = tmp_path / "bundle"
    flags = ("--memory", MEMORY, "-o", str(output), "--cache", str(plans), "--batch-sizes", "1", *SEARCH)
    slow = ("--link-bandwidth", "90MB/s", "--no-pack-weights")
    assert main(["export-bundle", str(repository), *flags, *slow]) == 0
    for path in (output / "cache" / "profiles").glob("*.json"):
        assert decode(cache_file.read(path)).swap_in.bandwidth_bytes_per_s <= 95e6
    written = read_bundle(output)
    assert "plain weights" in written.machine
    for model in written.models:
        missing = WEIGHTS_MIB * 2**20 - model.partition_bytes
        assert model.latency_s >= max(missing, 0) / 95e6
    with serving_bundle(output) as server:
        assert all(is_answer_of(seed, answer(server, name)) for seed, name in enumerate(MODELS))
    assert main(["export-bundle", str(repository), *flags]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_process_memory_is_refused_with_its_parts_or_suffices(bundle: Path) -> None:
    """Of both processes, which take over 300 MiB before any model."""
    status, shown = refused_start(bundle, MEMORY, bundle, "--process-memory", "200MiB")
    assert status == 2
    assert "--process-memory 200.0 MiB is not enough" in shown
    least = int(re.search(r"at least (\d+)MiB", shown)[1])  # type: ignore[index]
    parts = [float(part) for part in re.findall(r" ([\d.]+) MiB\n", shown)]
    assert least - 2 - 0.05 * len(parts) < sum(parts) <= least, "parts are shown with one decimal"
    assert 8.0 in parts
    with process(bundle, MEMORY, bundle, "--process-memory", f"{least + 18}MiB") as server:
        server.until_ready()
        assert server.peak_bytes() <= least + 18 << 20


def statistic(cgroup: Path, name: str) -> int:
    return int(dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())[name])


@pytest.mark.slow  # drops the page cache of the whole machine
def test_process_memory_suffices_in_a_cgroup_of_that_size_with_libraries_counted(bundle: Path) -> None:
    """With nothing in the page cache. What these tests map as well is charged to them, and is taken off the limit."""
    _, shown = refused_start(bundle, MEMORY, bundle, "--engine", "in-process", "--process-memory", "100MiB")
    least_bytes = int(re.search(r"at least (\d+)MiB", shown)[1]) << 20  # type: ignore[index]
    assert least_bytes < 264 << 20, "an idle server takes 200 MiB"
    flags = ("--engine", "in-process", "--process-memory", f"{least_bytes}B")
    with memory_cgroup() as cgroup:
        limit = cgroup / "memory.limit_in_bytes"
        limit.write_text(str(least_bytes))
        as_root("sh", "-c", "sync; echo 3 > /proc/sys/vm/drop_caches")
        with process(bundle, MEMORY, bundle, *flags, cgroup=cgroup) as server:
            server.until_ready()
            whole_bytes = psutil.Process(server.popen.pid).memory_info().rss
            shared_bytes = whole_bytes - statistic(cgroup, "total_rss") - statistic(cgroup, "total_mapped_file")
            limit.write_text(str(least_bytes - max(0, shared_bytes)))
            read: list[int] = []
            for _ in range(10):
                assert all(is_answer_of(seed, answer(server, name)) for seed, name in enumerate(MODELS))
                read.append(statistic(cgroup, "total_pgmajfault"))
            assert read[-1] - read[5] < 50, "code that serving needs stays in memory"


def test_models_get_what_the_process_leaves(repository: Path, plans: Path) -> None:
    limit_bytes = 4 << 30
    with serving(
        repository, "8MiB", plans, process_memory_bytes=limit_bytes, store="file", queue_bytes=1 << 20
    ) as server:
        assert 0 < server.placement.decider.memory_bytes < limit_bytes - (100 << 20)
        assert server.placement.decider.memory_bytes % (4 << 20) == 0
        assert is_answer_of(0, answer(server, "a"))


def test_what_cannot_be_exported_leaves_no_folder(
    repository: Path, plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("-o", str(tmp_path / "bundle"), "--cache", str(plans), "--batch-sizes", BATCHES, *SEARCH)
    assert main(["export-bundle", str(repository), "--memory", "1MiB", *flags]) == 1
    assert "needs a budget of" in capsys.readouterr().err
    (tmp_path / "models" / "empty" / "1").mkdir(parents=True)
    assert main(["export-bundle", str(tmp_path / "models"), "--memory", "1MiB", *flags]) == 2
    assert "empty: it has no file model.pt2; repair it, or take it out" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()
    bundled = tmp_path / "models" / "empty" / "1" / "model.lowered"
    bundled.write_text("0" * 64)
    refused = pytest.raises(StartFailed, match="stands for an archive that was lowered elsewhere")
    with refused, serving(tmp_path / "models", "8MiB", tmp_path / "cache"):
        pass

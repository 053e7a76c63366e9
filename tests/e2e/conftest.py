"""What the end-to-end tests share: models exported and lowered once, and a process left as it was."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs

from cohabit.planner import cache_file
from cohabit.planner import profile as profile_format
from cohabit.planner.profile import Link
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import serving
from tests.support.e2e.stacks import Stacks
from tests.support.measuring import short_measurements
from tests.support.runtime.models import locked


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory, run_folder: Path) -> Iterator[Archives]:
    root = tmp_path_factory.mktemp("e2e")
    yield Archives(root, run_folder)
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def stacks(run_folder: Path) -> Stacks:
    return Stacks(run_folder / "stacks")


@pytest.fixture(scope="session")
def prepared(stacks: Stacks, run_folder: Path) -> Path:
    """A cache with stacks lowered and measured. Not to be written to: all workers of the run share it.

    Plans are always the same: computing a layer takes as long as copying half a MiB.
    """
    made = run_folder / "fixed" / "cache"
    with locked(made.with_suffix(".lock")):
        if not made.exists():
            with short_measurements():  # the fixture of each module comes after those of the session
                _with_fixed_profiles(stacks, made.parent / "models", made.with_suffix(".new")).rename(made)
    return made


@pytest.fixture(scope="session")
def plans(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the servers that serve stacks."""
    return shutil.copytree(prepared, tmp_path_factory.mktemp("fixed") / "cache")


@pytest.fixture
def own_cache(prepared: Path, tmp_path: Path) -> Path:
    """A cache that no other test uses, with stacks lowered and measured, and without plans."""
    return shutil.copytree(prepared, tmp_path / "cache")


def _with_fixed_profiles(stacks: Stacks, repository: Path, cache: Path) -> Path:
    for seed, name in enumerate("abcd"):
        stacks.put(repository, name, seed)
    # The models are lowered and measured now, as every test serves them: forms of layers, and so profiles, depend on
    # a lane's threads and on the batches.
    for lanes, batches in ((1, (1,)), (1, (1, 2)), (2, (1, 2))):
        with serving(repository, "20MiB", cache, batch_sizes=batches, compute_lanes=lanes):
            pass
    for path in (cache / "profiles").glob("*.json"):
        profile = profile_format.decode(cache_file.read(path))
        seconds, link = (100e-6,) * len(profile.op_seconds), Link(5e-6, 5e9)
        fixed = structs.replace(profile, op_seconds=seconds, swap_in=link, compute_slowdown=1.0, swap_slowdown=1.0)
        cache_file.write(path, profile_format.encode(fixed))
    shutil.rmtree(cache / "plans")
    return cache


@pytest.fixture(autouse=True)
def _the_process_stays_as_it_was() -> Iterator[None]:
    """A server in this process sets torch's threads, and that their results are the same every time."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)

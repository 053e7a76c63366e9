"""Starts the servers that are compared, each in a process of its own."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.scrape import free_port, serve_command

BARE = "bare handlers"
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Computed:
    """Requests, and the seconds that their executions took: one that answers several counts for each of them."""

    requests: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ComparedServer:
    """A server's addresses by protocol, and its process."""

    name: str
    addresses: Mapping[str, str]
    process: psutil.Process

    def computed(self, model: str) -> "Computed | None":
        """What the server's statistics say of a model; None if it keeps none."""
        try:
            with urllib.request.urlopen(f"http://{self.addresses['http']}/v2/models/{model}/stats") as answer:
                (entry,) = json.load(answer)["model_stats"]
        except urllib.error.HTTPError:
            return None
        total = entry["inference_stats"]["compute_infer"]
        return Computed(total["count"], total["ns"] / 1e9)


@contextlib.contextmanager
def cohabit(repository: Path, cache: Path) -> Iterator[ComparedServer]:
    command = serve_command(repository, "64MiB", None, cache, "--grpc-port", "0")
    with _process(command, {}) as process:
        addresses = _announced(process, ("http", "grpc"))
        _wait_until_ready(addresses["http"])
        yield ComparedServer("cohabit", addresses, psutil.Process(process.pid))


@contextlib.contextmanager
def bare() -> Iterator[ComparedServer]:
    with _process([sys.executable, "-m", "benchmarks.frontend.bare"], {}) as process:
        yield ComparedServer(BARE, _announced(process, ("http", "grpc")), psutil.Process(process.pid))


@contextlib.contextmanager
def tritonserver(binary: Path, repository: Path, scratch: Path) -> Iterator[ComparedServer]:
    """Run the tritonserver of an unpacked `nvidia-pytriton` wheel on the CPU."""
    home = binary.parent.parent
    http, grpc, metrics = (free_port() for _ in range(3))
    command = [str(binary), "--model-repository", str(repository)]
    command += ["--backend-directory", str(_backends(home, scratch)), "--log-info", "0", "--log-warning", "0"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    libraries = [sysconfig.get_config_var("LIBDIR"), str(home.parent.parent / "nvidia_pytriton.libs")]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with _process(command, environment) as process:
        addresses = {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{grpc}"}
        _wait_until_ready(addresses["http"])
        yield ComparedServer("tritonserver", addresses, psutil.Process(process.pid))


def find_tritonserver(given: Path | None) -> Path | None:
    """Return the binary that was named, or the one of an installed `nvidia-pytriton`; None if there is none."""
    if given is not None:
        return given.resolve() if given.is_file() else None
    spec = importlib.util.find_spec("pytriton")
    folders: Sequence[str] = (spec and spec.submodule_search_locations) or ()
    found = [
        path for folder in folders if (path := Path(folder) / "tritonserver" / "bin" / "tritonserver").is_file()
    ]
    return found[0] if found else None


def _backends(home: Path, scratch: Path) -> Path:
    """A folder of backends with the stub for this Python, which the wheel keeps elsewhere."""
    folder = scratch / "backends" / "python"
    shutil.copytree(home / "backends" / "python", folder, ignore=shutil.ignore_patterns("__pycache__"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = folder / "triton_python_backend_stub"
    shutil.copy(home / "python_backend_stubs" / version / stub.name, stub)
    stub.chmod(0o755)
    return folder.parent


@contextlib.contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _announced(process: subprocess.Popen[str], protocols: Sequence[str]) -> dict[str, str]:
    """Read `http: ADDRESS` and the like from what a server prints."""
    assert process.stdout is not None
    addresses: dict[str, str] = {}
    while not addresses.keys() >= set(protocols):
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{process.args!r} ended with status {process.wait()} before it listened")
        key, _, address = line.strip().partition(": ")
        addresses[key] = address.removeprefix("http://")
    return addresses


def _wait_until_ready(address: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=10).close()
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the server at {address} is not ready after {_PATIENCE_S:g} s")
        time.sleep(0.2)

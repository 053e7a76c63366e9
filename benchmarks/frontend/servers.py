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
from contextlib import AbstractContextManager
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


def cohabit(repository: Path, cache: Path) -> AbstractContextManager[ComparedServer]:
    http, grpc = free_port(), free_port()
    ports = ("--http-port", str(http), "--grpc-port", str(grpc))
    return _running("cohabit", serve_command(repository, "64MiB", None, cache, *ports), http, grpc)


def bare() -> AbstractContextManager[ComparedServer]:
    http, grpc = free_port(), free_port()
    return _running(BARE, [sys.executable, "-m", "benchmarks.frontend.bare", str(http), str(grpc)], http, grpc)


def tritonserver(binary: Path, repository: Path, scratch: Path) -> AbstractContextManager[ComparedServer]:
    """Run the tritonserver of an unpacked `nvidia-pytriton` wheel on the CPU."""
    home = binary.parent.parent
    http, grpc = free_port(), free_port()
    command = [str(binary), "--model-repository", str(repository)]
    command += ["--backend-directory", str(_backends(home, scratch)), "--log-info", "0", "--log-warning", "0"]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(free_port())]
    libraries = [sysconfig.get_config_var("LIBDIR"), str(home.parent.parent / "nvidia_pytriton.libs")]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return _running("tritonserver", command, http, grpc, environment)


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
def _running(
    name: str, command: Sequence[str], http: int, grpc: int, environment: Mapping[str, str] | None = None
) -> Iterator[ComparedServer]:
    """Run a server on these ports from when it is ready to the end of the context."""
    addresses = {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{grpc}"}
    process = subprocess.Popen(
        command, env=os.environ | (environment or {}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not _is_ready(addresses["http"]):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{name} is not ready, status {process.poll()}: {command!r}")
            time.sleep(0.2)
        yield ComparedServer(name, addresses, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False

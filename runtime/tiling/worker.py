"""Starts the worker processes of a tiled program, or joins those started by torchrun."""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


@dataclass(frozen=True, slots=True)
class Worker:
    """One process of `count`."""

    rank: int
    count: int


def start(task: Callable[[Worker], Any], workers: int) -> Any:
    """Run a task in every worker, and return the first worker's result; None in torchrun's other workers.

    Under torchrun, this process is a worker. Otherwise `workers` single-threaded processes are started. The task and
    its result are pickled. Raises torch's ProcessRaisedException if a worker fails.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = int(os.environ["WORLD_SIZE"])
        if found != workers:
            raise ValueError(f"torchrun started {found} processes for {workers} workers; make the numbers equal")
        return _work(task, workers, {})
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's matrix products in the processes
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work_and_tell, (task, workers, folder), nprocs=workers)  # type: ignore[no-untyped-call]
        return pickle.loads((Path(folder) / "result").read_bytes())


def _work_and_tell(rank: int, task: Callable[[Worker], Any], workers: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": workers}
    result = _work(task, workers, place)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads sometimes abort a normal exit with SIGABRT (torch 2.13)


def _work(task: Callable[[Worker], Any], workers: int, place: dict[str, Any]) -> Any:
    dist.init_process_group("gloo", **place)
    try:
        result = task(Worker(dist.get_rank(), workers))
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()

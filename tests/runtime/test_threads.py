"""Each thread that computes has the number of threads that was set, whichever thread set it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.runtime import models

_PROGRAM = """
import os, sys, threading
from pathlib import Path
import torch
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.measure.profile import resident_plan
from tests.support.runtime.backends import cpu, opened

torch.set_num_threads(1)
folder = Path(sys.argv[1])
lowered = lower(folder / "model.pt2", "net", [1], folder / "cache")
with opened(cpu, lowered) as bench:
    program = bench.beside(lowered, resident_plan(lowered.graphs[Bucket(1)]), Bases(0, 32 << 20))
    answers, inputs = [], lowered.examples(Bucket(1))
    def compute():
        before = len(os.listdir("/proc/self/task"))
        for _ in range(2):
            answers.append(bench.executor.run(program, inputs).outputs[0])
        print(len(os.listdir("/proc/self/task")) - before)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    print(int(torch.equal(*answers)))
"""


class Product(nn.Module):
    """A product of MKL's, which forks its own threads unless ATen has told OpenMP how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, x) * self.scale


@pytest.mark.long
def test_a_thread_that_computes_forks_no_others(tmp_path: Path) -> None:
    models.export(Product(), {"x": torch.zeros(3, 512, 512)}, tmp_path / "model.pt2")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"], "no more threads, and the first answer has the bits of the second"

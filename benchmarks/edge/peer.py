"""Runs ResNet-152 as a board's own program would, without a server: `python -m benchmarks.edge.peer WAY FILE REQUESTS`.

Prints the seconds from the start of the process to the first answer, then the median of the others and their 90th
percentile. Imports nothing but what the way needs, because its memory is limited: the network is written in torch
alone, with random weights.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

DEPTHS, IMAGE = (3, 8, 36, 3), (1, 3, 224, 224)


def main() -> None:
    way, path, requests = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = _onnxruntime(path) if way == "onnxruntime" else _pytorch(path, mmap=way == "pytorch-mmap")
    run()
    print(_age_s(), flush=True)
    times_s = []
    for _ in range(requests):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    print(statistics.median(times_s), statistics.quantiles(times_s, n=10)[-1], flush=True)


def network() -> "nn.Module":
    """Build ResNet-152 (He et al., table 1)."""
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                *(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
                *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
            )
            shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )
            self.shortcut = nn.Identity() if channels == 4 * width else shortcut

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) + self.shortcut(x)).relu_()

    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks, channels = [], 64
    for stage, depth in enumerate(DEPTHS):
        width = 64 << stage
        for index in range(depth):
            blocks.append(Block(channels, width, 2 if stage and not index else 1))
            channels = 4 * width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return nn.Sequential(*stem, *blocks, *head).eval()


def _pytorch(path: str, *, mmap: bool) -> Callable[[], object]:
    """Load a state dict, which is read or mapped, into a module that was made without memory."""
    import torch

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    with torch.device("meta"):
        model = network()
    model.load_state_dict(torch.load(path, mmap=mmap, weights_only=True), assign=True)
    image = torch.zeros(IMAGE)

    def run() -> object:
        with torch.inference_mode():
            return model(image)

    return run


def _onnxruntime(path: str) -> Callable[[], object]:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = max(1, len(os.sched_getaffinity(0)) - 1)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: np.zeros(IMAGE, np.float32)}
    return lambda: session.run(None, inputs)


def _age_s() -> float:
    """Return the time since this process began, from field 22 of proc_pid_stat(5)."""
    began_s = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


if __name__ == "__main__":
    main()

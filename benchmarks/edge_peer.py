"""Runs one model as a board's own program would, without a server: `python -m benchmarks.edge_peer WAY FILE REQUESTS`.

Prints the seconds from the start of the process to the first answer, then the median of the others. Imports nothing but
what the way needs, because its memory is limited.
"""

import statistics
import sys
import time
from collections.abc import Callable

import psutil

from loadgen.zoo import ZOO

MODEL = "resnet152"


def main() -> None:
    way, path, requests = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = _onnxruntime(path) if way == "onnxruntime" else _pytorch(path, mmap=way == "pytorch-mmap")
    run()
    print(time.time() - psutil.Process().create_time(), flush=True)
    times_s = []
    for _ in range(requests):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    print(statistics.median(times_s), flush=True)


def _pytorch(path: str, *, mmap: bool) -> Callable[[], object]:
    """Load a state dict, which is read or mapped, into a module that was made without memory."""
    import torch

    with torch.device("meta"):
        model, _ = ZOO[MODEL].build()
    model.load_state_dict(torch.load(path, mmap=mmap, weights_only=True), assign=True)
    image = torch.zeros(1, 3, 224, 224)

    def run() -> object:
        with torch.inference_mode():
            return model(image)

    return run


def _onnxruntime(path: str) -> Callable[[], object]:
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: np.zeros((1, 3, 224, 224), np.float32)}
    return lambda: session.run(None, inputs)


if __name__ == "__main__":
    main()

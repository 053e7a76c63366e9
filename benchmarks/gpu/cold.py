"""A cold model's first answer, and other ways to run a model that is not in memory, in one run on the same GPU.

PipeSwitch's and DeepPlan's case: nothing of the model is on the device. Peers: plain eager PyTorch and a CUDA graph
with everything resident (the ideal), layers streamed through two buffers by hand, accelerate's cpu_offload. All compute
channels last, with torch's own default of TF32; ours also has cuDNN's fused kernels, as served.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.gpu import steps
from benchmarks.gpu.common import (
    RUNS,
    Measured,
    described,
    latencies_s,
    loaded,
    open_gpu,
    planned,
    resident,
    resnet,
    seconds_of,
)
from benchmarks.gpu.resnet import INPUT, resnet152
from benchmarks.record import markdown_table
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.options import CUDA_DEFAULTS

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    seconds: float


def cells() -> list[str]:
    return [OURS, *_peers()]


def _peers() -> dict[str, Callable[[], float]]:
    return {
        "eager PyTorch, resident": _eager,
        "CUDA graph of eager PyTorch, resident": _graphed,
        "layers through two buffers, by hand": _two_buffers,
        "accelerate cpu_offload": _accelerate,
    }


def measure(cell: str) -> Iterator[Row | str]:
    if cell == OURS:
        backend = open_gpu()
        for name, seconds in _ours(backend, resnet(backend, 1)):
            yield Row(name, seconds)
        return
    try:
        yield Row(cell, _peers()[cell]())
    except ImportError:
        yield f"{cell}: the package is not installed here."


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    ready_s = rows[0].seconds if rows else 1.0
    table = [[r.name, f"{r.seconds * 1e3:.2f}", f"{r.seconds / ready_s:.2f}x"] for r in rows]
    about = (
        f"Medians of {RUNS} inferences of ResNet-152 at batch 1, each on an idle device. Ours as served:"
        f" {described(CUDA_DEFAULTS)}. The others: channels last, TF32 in cuDNN alone, as torch has it.\n"
    )
    return [
        about,
        markdown_table(("way", "ms", "over ready"), table),
        *(f"{note}\n" for note in notes),
    ]


def _ours(backend: CudaBackend, model: Measured) -> Iterator[tuple[str, float]]:
    graph = model.graph(1)
    with resident(backend, model, 1) as program:
        ready_s = statistics.median(latencies_s(backend, program))
        run = backend.executor.run
        serial = [backend.executor.load(program) + run(program, program.examples()).latency_s for _ in range(RUNS)]
    yield "ready: everything resident, one graph", ready_s
    yield "cold: load, then run", statistics.median(serial)
    room = -(-(graph.parameter_bytes + peak_activation_bytes(graph)) // 4096) * 4096
    with loaded(backend, model, planned(model, 1, Memory(room)), 1) as program:
        yield "cold: streamed while it runs", statistics.median(latencies_s(backend, program))
    half = graph.parameter_bytes // 2 // 4096 * 4096
    with loaded(backend, model, planned(model, 1, Memory(room - half, half)), 1) as program:
        yield "half of the weights resident", statistics.median(latencies_s(backend, program))


def _eager() -> float:
    model = resnet152(torch.channels_last).cuda()
    return seconds_of(lambda x: model(x), 1)


def _graphed() -> float:
    model, x = resnet152(torch.channels_last).cuda(), torch.zeros(1, *INPUT, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(3):
            model(x)
        with torch.cuda.graph(graph, stream=stream):
            y = model(x)

    def run(given: torch.Tensor) -> torch.Tensor:
        x.copy_(given)
        graph.replay()
        return y

    return seconds_of(run, 1)


def _accelerate() -> float:
    from accelerate import cpu_offload

    model = resnet152(torch.channels_last)
    cpu_offload(model, execution_device=torch.device("cuda", torch.cuda.current_device()))
    return seconds_of(lambda x: model(x), 1, runs=5)


def _two_buffers() -> float:
    """Layer n + 1 is copied to one buffer while layer n computes from the other."""
    model = resnet152(torch.channels_last)
    layers = [_Streamed(layer) for layer in model.layers]
    buffers = [torch.empty(max(s.nbytes for s in layers), dtype=torch.uint8, device="cuda") for _ in range(2)]
    link, arrived, free = torch.cuda.Stream(), *([torch.cuda.Event() for _ in range(2)] for _ in range(2))

    def fetch(n: int) -> None:
        with torch.cuda.stream(link):
            link.wait_event(free[n % 2])
            buffers[n % 2][: layers[n].nbytes].copy_(layers[n].host, non_blocking=True)
            arrived[n % 2].record(link)

    def run(x: torch.Tensor) -> torch.Tensor:
        compute = torch.cuda.current_stream()
        fetch(0)
        for n, layer in enumerate(layers):
            if n + 1 < len(layers):
                fetch(n + 1)
            compute.wait_event(arrived[n % 2])
            x = layer.run(x, buffers[n % 2])
            free[n % 2].record(compute)
        return x

    return seconds_of(run, 1)


class _Streamed:
    """A layer whose parameters lie one behind the other in one pinned tensor."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._places: dict[str, tuple[int, torch.Tensor]] = {}
        position = 0
        tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        for name, tensor in tensors.items():
            self._places[name] = (position, tensor.detach())
            position += -(-tensor.nbytes // 256) * 256
        self.nbytes = max(position, 256)
        self.host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        for start, tensor in self._places.values():
            _placed(self.host, start, tensor).copy_(tensor)

    def run(self, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        own = {name: _placed(buffer, start, tensor) for name, (start, tensor) in self._places.items()}
        result: torch.Tensor = torch.func.functional_call(self._layer, own, (x,))
        return result


def _placed(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over some of the bytes, of the other's type, shape and strides."""
    return memory[start : start + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


STEP = steps.Step(
    "benchmarks.gpu.cold", "A cold model's first answer", Row, cells, measure, _sections, cell_s=110.0
)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))

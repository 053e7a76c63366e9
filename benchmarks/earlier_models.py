"""Nine models that no rewrite was made for, with random weights: a table of `benchmarks.peers`."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.seeded import EXAMPLE_BATCH, calibrate_batch_norms, seeded, token_ids

Tensor = torch.Tensor
Built = tuple[nn.Module, Inputs]


def _conv(channels: int, features: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm and SiLU. A stride of 2 pads below and to the right only, as TensorFlow's nets do."""
    pad = kernel // 2
    first = [nn.ZeroPad2d((pad - 1, pad, pad - 1, pad))] if stride == 2 else []
    conv = nn.Conv2d(channels, features, kernel, stride, 0 if first else pad, groups=groups, bias=False)
    return nn.Sequential(*first, conv, nn.BatchNorm2d(features), nn.SiLU())


class GatedBlock(nn.Module):
    """An inverted residual with a squeeze-and-excite gate."""

    def __init__(self, channels: int, features: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = channels * expand
        self.expand = _conv(channels, inner, 1) if expand > 1 else nn.Identity()
        self.depthwise = _conv(inner, inner, kernel, stride, groups=inner)
        self.squeeze, self.excite = nn.Conv2d(inner, channels // 4, 1), nn.Conv2d(channels // 4, inner, 1)
        self.project = nn.Sequential(nn.Conv2d(inner, features, 1, bias=False), nn.BatchNorm2d(features))
        self.residual = stride == 1 and channels == features

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        gate = self.excite(functional.silu(self.squeeze(functional.adaptive_avg_pool2d(y, 1))))
        y = self.project(y * torch.sigmoid(gate))
        return y + x if self.residual else y


class GatedMobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
        channels = 32
        stages = ((16, 3, 1, 1, 1), (24, 3, 2, 6, 2), (40, 5, 2, 6, 2), (80, 3, 2, 6, 3), (112, 5, 1, 6, 3))
        for features, kernel, stride, expand, count in (*stages, (192, 5, 2, 6, 4), (320, 3, 1, 6, 1)):
            for n in range(count):
                layers.append(GatedBlock(channels, features, kernel, stride if n == 0 else 1, expand))
                channels = features
        self.features = nn.Sequential(*layers, _conv(channels, 1280, 1))
        self.head = nn.Linear(1280, 1000)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.features(image).mean((2, 3)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "vocab_size": 8000}
        heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "attn_implementation": "sdpa"}
        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits


class Vocoder(nn.Module):
    """Mel frames to samples: transposed convolutions, each followed by two stacks of dilated residual ones."""

    def __init__(self, bins: int = 80, width: int = 128) -> None:
        super().__init__()
        self.first, self.stages = nn.Conv1d(bins, width, 7, padding=3), nn.ModuleList()
        for rate in (8, 8, 2, 2):
            up = nn.ConvTranspose1d(width, width // 2, 2 * rate, rate, padding=rate // 2)
            width //= 2
            blocks = nn.ModuleList(nn.ModuleList(self._dilated(width, k, d) for d in (1, 3)) for k in (3, 7))
            self.stages.append(nn.ModuleList([up, blocks]))
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    @staticmethod
    def _dilated(width: int, kernel: int, dilation: int) -> nn.Conv1d:
        return nn.Conv1d(width, width, kernel, dilation=dilation, padding=dilation * (kernel // 2))

    def forward(self, mel: Tensor) -> Tensor:
        x = self.first(mel)
        for stage in self.stages:
            up, blocks = cast("nn.ModuleList", stage)
            x = up(functional.leaky_relu(x, 0.1))
            sums: list[Tensor] = []
            for block in cast("nn.ModuleList", blocks):
                y = x
                for conv in cast("nn.ModuleList", block):
                    y = y + conv(functional.leaky_relu(y, 0.1))
                sums.append(y)
            x = sum(sums[1:], sums[0]) / len(sums)
        return torch.tanh(self.last(functional.leaky_relu(x)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 100)
        self.lstm = nn.LSTM(100, 160, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(320, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0]).log_softmax(-1)


class Recommender(nn.Module):
    """Dense features and categories, whose vectors' products in pairs go into a second perceptron."""

    def __init__(self, fields: int = 26, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2000, width) for _ in range(fields))
        pairs = (fields + 1) * fields // 2
        self.bottom = _perceptron(13, 256, 128, width)
        self.top = nn.Sequential(_perceptron(width + pairs, 512, 256), nn.Linear(256, 1))
        rows, columns = torch.tril_indices(fields + 1, fields + 1, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x_BD = self.bottom(dense)
        own = [table(categories[:, n]) for n, table in enumerate(self.tables)]
        x_BFD = torch.stack([x_BD, *own], 1)
        products = torch.bmm(x_BFD, x_BFD.transpose(1, 2))[:, self.get_buffer("rows"), self.get_buffer("columns")]
        return torch.sigmoid(self.top(torch.cat([x_BD, products], 1)))


def _perceptron(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())))


class SplitBlock(nn.Module):
    """Half of the channels pass through bottlenecks; all stages are joined."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.first, half = _conv(channels, features, 1), features // 2
        self.inner = nn.Sequential(_conv(half, half, 3), _conv(half, half, 3))
        self.last = _conv(features + half, features, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, 1)
        return self.last(torch.cat([a, b, b + self.inner(b)], 1))


class Detector(nn.Module):
    """Boxes and classes at three scales of an image."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 16, 3, 2), _conv(16, 32, 3, 2), SplitBlock(32, 32))
        self.down = nn.ModuleList(
            nn.Sequential(_conv(c, 2 * c, 3, 2), SplitBlock(2 * c, 2 * c)) for c in (32, 64, 128)
        )
        self.up = nn.ModuleList([SplitBlock(256 + 128, 128), SplitBlock(128 + 64, 64)])
        self.heads = nn.ModuleList(
            nn.Sequential(_conv(c, 64, 3), nn.Conv2d(64, 4 + classes, 1)) for c in (64, 128, 256)
        )

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        kept = [self.stem(image)]
        for down in self.down:
            kept.append(down(kept[-1]))
        levels = [kept[-1]]
        for up, lateral in zip(self.up, (kept[2], kept[1]), strict=True):
            larger = functional.interpolate(levels[0], scale_factor=2.0, mode="nearest")
            levels.insert(0, up(torch.cat([larger, lateral], 1)))
        found = torch.cat([head(x).flatten(2) for head, x in zip(self.heads, levels, strict=True)], 2).mT
        return {"boxes": functional.softplus(found[..., :4]), "scores": torch.sigmoid(found[..., 4:])}


class NoiseBlock(nn.Module):
    def __init__(self, channels: int, features: int, times: int, attends: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(16, channels), nn.GroupNorm(16, features)])
        self.convs = nn.ModuleList([nn.Conv2d(channels, features, 3, padding=1)])
        self.convs.append(nn.Conv2d(features, features, 3, padding=1))
        self.time = nn.Linear(times, features)
        self.skip = nn.Conv2d(channels, features, 1) if channels != features else nn.Identity()
        self.attention = nn.MultiheadAttention(features, 4, batch_first=True) if attends else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.convs[0](functional.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        y = self.skip(x) + self.convs[1](functional.silu(self.norms[1](y)))
        if self.attention is not None:
            tokens = y.flatten(2).mT
            y = y + self.attention(tokens, tokens, tokens, need_weights=False)[0].mT.reshape(y.shape)
        return y


class NoiseUNet(nn.Module):
    """The noise in an image, given how far its diffusion has gone."""

    def __init__(self, width: int = 48, times: int = 192) -> None:
        super().__init__()
        self.width, widths = width, (width, 2 * width, 4 * width)
        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times), nn.SiLU())
        self.first, self.down, self.up = nn.Conv2d(4, width, 3, padding=1), nn.ModuleList(), nn.ModuleList()
        for n, (a, b) in enumerate(pairwise((width, *widths))):
            self.down.append(NoiseBlock(a, b, times, n == 2))
        for n, (a, b) in enumerate(pairwise((*reversed(widths), width))):
            self.up.append(NoiseBlock(2 * a, b, times, n == 0))
        self.norm, self.last = nn.GroupNorm(16, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, latent: Tensor, step: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10_000) / (self.width // 2) * torch.arange(self.width // 2))
        angles = step * rates
        time, x, kept = self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.first(latent), []
        for n, block in enumerate(self.down):
            x = block(functional.avg_pool2d(x, 2) if n else x, time)
            kept.append(x)
        for n, block in enumerate(self.up):
            x = functional.interpolate(x, scale_factor=2.0) if n else x
            x = block(torch.cat([x, kept.pop()], 1), time)
        return self.last(functional.silu(self.norm(x)))


class SpeechEncoder(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(80, width, 3, padding=1), nn.Conv1d(width, width, 3, 2, 1)
        self.positions = nn.Parameter(torch.randn(150, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, mel: Tensor) -> Tensor:
        x = functional.gelu(self.b(functional.gelu(self.a(mel)))).mT + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Forecaster(nn.Module):
    """The next values of several series, each read in patches and scaled by its own mean and deviation."""

    def __init__(self, length: int = 336, ahead: int = 96, patch: int = 16, width: int = 128) -> None:
        super().__init__()
        self.patch, count = patch, (length - patch) // 8 + 1
        self.embed, self.positions = nn.Linear(patch, width), nn.Parameter(torch.randn(count, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 2 * width, 0.0, "gelu", batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(count * width, ahead)

    def forward(self, series: Tensor) -> Tensor:
        mean, deviation = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
        patches = ((series - mean) / deviation).mT.unfold(-1, self.patch, 8)
        x = (self.embed(patches) + self.positions).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1)).unflatten(0, patches.shape[:2]).mT * deviation + mean


def _model(make: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> Callable[[], Built]:
    def build() -> Built:
        with seeded(0):
            model, given = make().eval(), inputs()
            calibrate_batch_norms(model, given)
            return model, given

    return build


def _random(**sizes: tuple[int, ...]) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(EXAMPLE_BATCH, *size) for name, size in sizes.items()}


EARLIER: Mapping[str, Callable[[], Built]] = {
    "gated_mobilenet": _model(GatedMobileNet, _random(image=(3, 224, 224))),
    "decoder": _model(Decoder, lambda: {"input_ids": token_ids(8000, 40)}),
    "vocoder": _model(Vocoder, _random(mel=(80, 32))),
    "tagger": _model(Tagger, lambda: {"input_ids": token_ids(5000, 32)}),
    "recommender": _model(
        Recommender, lambda: {"dense": torch.randn(EXAMPLE_BATCH, 13), "categories": token_ids(2000, 26)}
    ),
    "detector": _model(Detector, _random(image=(3, 256, 256))),
    "noise_unet": _model(
        NoiseUNet, lambda: {**_random(latent=(4, 32, 32))(), "step": torch.rand(EXAMPLE_BATCH, 1)}
    ),
    "speech_encoder": _model(SpeechEncoder, _random(mel=(80, 300))),
    "forecaster": _model(Forecaster, _random(series=(336, 7))),
}
"""Builds of each model and example inputs, by name: the same weights in every process."""

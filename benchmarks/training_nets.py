"""Five networks to train, each a list of blocks, so that every block's activations can be checkpointed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A network whose parts can be computed again in the backward pass (`torch.utils.checkpoint`)."""

    is_checkpointed = False

    def run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.is_checkpointed:
            return cast(Tensor, checkpoint(block, *inputs, use_reentrant=False))
        return cast(Tensor, block(*inputs))


@dataclass(frozen=True, slots=True)
class Net:
    """A network's constructor, and its batches."""

    model: Callable[[], Blocks]
    inputs: Callable[[int], Sequence[Tensor]]
    """A batch of so many samples."""
    samples: int
    """Of its own batch."""

    def batch(self, samples: int | None = None) -> Sequence[Tensor]:
        """A batch of its own size, or of so many samples."""
        return self.inputs(self.samples if samples is None else samples)


class Residual(nn.Module):
    """Wide ResNet's basic block (Zagoruyko and Komodakis, 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(y)
        result: Tensor = kept + self.conv2(F.relu(self.norm2(self.conv1(y))))
        return result


class WideResNet(Blocks):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        channels = [16, 16 * width, 32 * width, 64 * width]
        blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
        for before, after in pairwise(channels):
            stride = 1 if before == 16 else 2
            blocks += [Residual(before if n == 0 else after, after, stride if n == 0 else 1) for n in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.BatchNorm2d(channels[-1]), nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        result: Tensor = self.head(F.relu(self.norm(x)).mean((2, 3)))
        return result


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Mixed(nn.Module):
    """Four branches of convolutions side by side, as in Inception-v3's first modules."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _conv(inputs, width, 1),
                nn.Sequential(_conv(inputs, width, 1), _conv(width, width, 5)),
                nn.Sequential(_conv(inputs, width, 1), _conv(width, width, 3), _conv(width, width, 3)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(inputs, width, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Inception(Blocks):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        stem = nn.Sequential(_conv(3, 32, 3), _conv(32, 4 * width, 3, 2))
        self.blocks = nn.ModuleList([stem, *(Mixed(4 * width, width) for _ in range(depth))])
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


class Cells(nn.Module):
    """Some time steps of an LSTM layer on [time, batch, width]; its state is hidden and cell side by side."""

    def __init__(self, layer: "LstmLayer", start: int, end: int) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that its parameters are registered once
        self._range = range(start, end)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        layer = self._layer[0]
        outputs = []
        for t in self._range:
            hidden, cell = state.chunk(2, 1)
            i, f, g, o = layer.gates(torch.cat([x[t], hidden], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = torch.cat([o.sigmoid() * cell.tanh(), cell], 1)
            outputs.append(state)
        return torch.stack(outputs)


class LstmLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)


class Lstm(Blocks):
    """LSTMs unrolled over time, and the next token from each state."""

    def __init__(self, width: int, layers: int, length: int, words: int, segment: int = 8) -> None:
        super().__init__()
        self.width = width
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(LstmLayer(width) for _ in range(layers))
        self._segments = [
            [Cells(cast(LstmLayer, layer), t, t + segment) for t in range(0, length, segment)]
            for layer in self.layers
        ]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).transpose(0, 1).contiguous()
        for segments in self._segments:
            state, outputs = torch.zeros(tokens.shape[0], 2 * self.width, device=tokens.device), []
            for cells in segments:
                states = self.run(cells, x, state)
                state = states[-1]
                outputs.append(states[..., : self.width])
            x = torch.cat(outputs)
        result: Tensor = self.head(x[-1])
        return result


class Attention(nn.Module):
    """A block of a GPT on [batch, time, width]: attention to earlier tokens, and two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (y.reshape(shape).transpose(1, 2) for y in self.into(self.norm1(x)).chunk(3, -1))
        scores = (q @ k.transpose(2, 3)) * (width // self.heads) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Gpt(Blocks):
    def __init__(self, width: int, depth: int, length: int, words: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width, width // 32) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run(block, x)
        result: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return result


class UNet(Blocks):
    """Down and up again, with skip connections: what the first layers make is used last."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << n for n in range(levels)]
        self.down = nn.ModuleList(
            nn.Sequential(_conv(i, o, 3), _conv(o, o, 3)) for i, o in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.Sequential(_conv(3 * o, o, 3), _conv(o, o, 3)) for o in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for n, block in enumerate(self.down):
            x = self.run(block, x if n == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = self.run(block, torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        result: Tensor = self.head(x)
        return result


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], batch: Sequence[Tensor]
) -> Tensor:
    value = loss(model, *batch)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def _images(batch: int, size: int, targets: tuple[int, ...] = ()) -> Sequence[Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch, *targets))


def _tokens(batch: int, length: int, words: int, targets: tuple[int, ...]) -> Sequence[Tensor]:
    return torch.randint(0, words, (batch, length)), torch.randint(0, words, targets)


NETS = {
    "wide_resnet": Net(lambda: WideResNet(2, 2), lambda n: _images(n, 32), 152),
    "inception": Net(lambda: Inception(24, 6), lambda n: _images(n, 64), 24),
    "lstm": Net(lambda: Lstm(192, 2, 24, 1000), lambda n: _tokens(n, 24, 1000, (n,)), 672),
    "gpt": Net(lambda: Gpt(192, 6, 128, 1000), lambda n: _tokens(n, 128, 1000, (128 * n,)), 26),
    "unet": Net(lambda: UNet(12, 4), lambda n: _images(n, 192, (192, 192)), 8),
}
TINY = {
    "wide_resnet": Net(lambda: WideResNet(2, 1), lambda n: _images(n, 32), 64),
    "inception": Net(lambda: Inception(8, 2), lambda n: _images(n, 64), 32),
    "lstm": Net(lambda: Lstm(128, 1, 16, 100), lambda n: _tokens(n, 16, 100, (n,)), 256),
    "gpt": Net(lambda: Gpt(64, 2, 128, 100), lambda n: _tokens(n, 128, 100, (128 * n,)), 16),
    "unet": Net(lambda: UNet(8, 3), lambda n: _images(n, 128, (128, 128)), 4),
}
"""The same in tens of MB, to try the benchmark with."""

"""Small models, each with one thing that lowering has to get right."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.options import DEFAULTS, Options


class ConvNorm(nn.Module):
    """Batch norms to fold, one of them behind a convolution whose result is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        for norm in (self.norm, self.norm2):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = self.second(x)
        return self.head((self.norm2(y) + y).mean((2, 3)))


class InPlace(nn.Module):
    """In-place activations, an in-place sum, and an input that is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        y = nn.functional.relu(self.a(x), inplace=True)
        y += x
        y[:, :4] = 0
        z = self.b(y)
        clipped = z.clamp_(min=0)
        return torch.tanh(clipped) + z


class Tied(nn.Module):
    """A weight under two names, a large embedding table, a split head with the table's own bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9000, 96)
        self.mix = nn.Linear(96, 96)
        self.mix_again = nn.Linear(96, 96)
        self.mix_again.weight = self.mix.weight
        self.head = nn.Linear(96, 9000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        hidden = self.mix_again(torch.tanh(self.mix(x)))
        return {"logits": self.head(hidden), "hidden": hidden}


class Recurrent(nn.Module):
    def __init__(self, kind: str, bidirectional: bool) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(12, 16, num_layers=3, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = self.rnn(x)
        if isinstance(state, tuple) and torch.__version__ < "2.13":
            return out, out[:, -1].clone()  # torch.export records wrong shapes of an LSTM's states before
        return out, state[0].transpose(0, 1).clone() if isinstance(state, tuple) else state.transpose(0, 1).clone()


class Attention(nn.Module):
    """Packed projections (views of one weight), a no-grad region, and a view as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        with torch.no_grad():
            scaled = x * 0.5
        y, weights = self.attention(scaled, scaled, scaled)
        z = self.norm(y + x)
        return {"z": z, "parts": (z.transpose(1, 2), weights)}


class Branch(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x) + 1, (x,))


class Scalar(nn.Module):
    """A number read out of a tensor while the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * x.max().item()


class Constants(nn.Module):
    """Outputs that are an input, a weight, and a constant made on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 4))
        self.register_buffer("table", torch.arange(12.0).reshape(4, 3))

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones_like(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x, torch.where(flag, ones * self.scale, x) @ self.table


class LargeLayers(nn.Module):
    """A convolution and a linear layer that are most of the model, and a grouped one that cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(64, 256, 65, padding=32)
        self.grouped = nn.Conv2d(256, 256, (1, 3), padding=(0, 1), groups=4)
        self.head = nn.Linear(256, 1500, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.wide(x)).unsqueeze(2)
        return self.head(self.grouped(y).mean((2, 3)))


class Experts(nn.Module):
    """Stacked experts, by `einsum` and by `bmm`, and a weighted sum of them, which is over the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, 8)
        self.up = nn.Parameter(torch.randn(8, 48, 512) / 7)
        self.down = nn.Parameter(torch.randn(8, 512, 480) / 22)
        self.mix = nn.Parameter(torch.randn(8, 480, 640) / 62)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bd, edf -> ebf", x, self.up).relu()
        return torch.einsum("ebd,edf,be->bf", torch.bmm(hidden, self.down), self.mix, self.gate(x).softmax(-1))


class Sums(nn.Module):
    """Sums in Einstein's notation that stay whole: a diagonal, a number, an operand that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.diagonal = nn.Parameter(torch.randn(96, 96, 40))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.spread = nn.Parameter(torch.randn(96, 40, 90) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.einsum("eed,bd->be", self.diagonal, torch.einsum(",bd->bd", self.number, x))
        return first + torch.einsum("edf,ebd->be", self.spread, x.unsqueeze(0))


class IntegerWeights(nn.Module):
    """Linear layers whose weights are stored as bytes, with a scale per row and with one for all, and offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("up", torch.randint(-127, 127, (2048, 640), dtype=torch.int8))
        self.register_buffer("offsets", torch.randint(-9, 9, (2048, 1), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(2048, 1) / 127)
        self.register_buffer("bias", torch.rand(2048))
        self.register_buffer("down", torch.randint(-127, 127, (700, 2048), dtype=torch.int8))
        self.register_buffer("scale", torch.tensor(1 / 127))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = (self.up.to(x.dtype) - self.offsets) * self.scales
        hidden = nn.functional.linear(x, up, self.bias).relu()
        return nn.functional.linear(hidden, self.down.to(x.dtype) * self.scale)


class Residual(nn.Module):
    """Sums and activations that may overwrite an operand, and ones that must not: it is read again, or broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = torch.relu(y) + torch.tanh(self.b(y))
        narrow = self.c(z) + z
        twice = self.a(narrow)
        return torch.relu(twice * twice) + torch.sigmoid(self.c(x))


class OwnSums(nn.Module):
    """Sums and activations that the model itself makes in place: plain ones, of a view, of an input, and read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y += x
        y = torch.relu(y)
        z = self.b(y)
        z += y
        z = nn.functional.relu_(z)
        halves = self.a(z)
        left = halves[:, :8]
        left += 1
        twice = self.b(halves)
        kept = twice + 0.5
        twice *= 2
        return torch.relu(halves) + kept + twice


class FixedWeights(nn.Module):
    """A weight norm, a weight that is read in two forms, one that would grow, and one that is used as it is as well."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
        self.joined = nn.Parameter(torch.randn(12, 6))
        self.column, self.row = nn.Parameter(torch.randn(6, 1)), nn.Parameter(torch.randn(1, 6))
        self.shared = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.joined.exp().chunk(2)
        y = self.normed(x).mean(-1)
        y = torch.tanh(y @ left) + torch.tanh(y @ right)
        return y @ (self.column * self.row) + y @ self.shared.sin() + y @ self.shared


class Bags(nn.Module):
    """Bags of the rows of a large table, by a matrix of indices and with an index that is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(9000, 40, mode="sum")
        self.means = nn.EmbeddingBag(9000, 40, mode="mean")
        self.skipping = nn.EmbeddingBag(9000, 40, mode="sum", padding_idx=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.sums(tokens) + self.means(tokens) + self.skipping(tokens)


class Wide(nn.Module):
    """Layers of very different sizes, for budgets."""

    def __init__(self, layers: int = 6, width: int = 384) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


def export(
    model: nn.Module, examples: dict[str, torch.Tensor], path: Path, *, dynamic: bool = True
) -> torch.export.ExportedProgram:
    """Export with a batch from 1 to 64 in front, and save.

    Where opt_einsum is installed, `torch.einsum` plans for the example's batch, which the export then fixes.
    """
    shapes = {name: {0: Dim("batch", min=1, max=64)} for name in examples} if dynamic else None
    with torch.backends.opt_einsum.flags(enabled=False):
        program = torch.export.export(model.eval(), (), kwargs=examples, dynamic_shapes=shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    return program


def lowered(
    model: nn.Module,
    examples: dict[str, torch.Tensor],
    folder: Path,
    name: str,
    batches: Sequence[int],
    *,
    options: Options = DEFAULTS,
    dynamic: bool = True,
) -> Lowered:
    """Export to `model.pt2` of a folder, and lower with a cache in the same folder."""
    export(model, examples, folder / "model.pt2", dynamic=dynamic)
    return lower(folder / "model.pt2", name, batches, folder / "cache", options=options)


CASES: dict[str, tuple[type[nn.Module] | object, dict[str, torch.Tensor]]] = {
    "conv_norm": (ConvNorm, {"x": torch.zeros(3, 3, 8, 8)}),
    "fixed_weights": (FixedWeights, {"x": torch.zeros(3, 4, 12)}),
    "bags": (Bags, {"tokens": torch.zeros(3, 5, dtype=torch.int64)}),
    "in_place": (InPlace, {"x": torch.zeros(3, 16)}),
    "tied": (Tied, {"tokens": torch.zeros(3, 5, dtype=torch.int64)}),
    "lstm": (lambda: Recurrent("LSTM", False), {"x": torch.zeros(3, 5, 12)}),
    "bidirectional_lstm": (lambda: Recurrent("LSTM", True), {"x": torch.zeros(3, 5, 12)}),
    "bidirectional_gru": (lambda: Recurrent("GRU", True), {"x": torch.zeros(3, 5, 12)}),
    "attention": (Attention, {"x": torch.zeros(3, 5, 32)}),
    "branch": (Branch, {"x": torch.zeros(3, 8)}),
    "scalar": (Scalar, {"x": torch.zeros(3, 8)}),
    "constants": (Constants, {"x": torch.zeros(3, 4), "flag": torch.zeros(3, 4, dtype=torch.bool)}),
    "large_layers": (LargeLayers, {"x": torch.zeros(3, 64, 20)}),
    "experts": (Experts, {"x": torch.zeros(3, 48)}),
    "sums": (Sums, {"x": torch.zeros(3, 40)}),
    "integer_weights": (IntegerWeights, {"x": torch.zeros(3, 640)}),
    "own_sums": (OwnSums, {"x": torch.zeros(3, 16)}),
    "residual": (Residual, {"x": torch.zeros(3, 16)}),
    "wide": (Wide, {"x": torch.zeros(3, 384)}),
}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out, such as the other workers of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Constructs(dict[str, Lowered]):
    """The models of `CASES`, exported and lowered at batches 2 and 4 once per run, when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def archive(self, name: str) -> Path:
        """The model with the weights that `made` gives it. Not to be written to."""
        path = self._folder / name / "model.pt2"
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                export(made(name), CASES[name][1], path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
        return path

    def lowered(
        self, name: str, folder: Path, options: Options = DEFAULTS, batches: Sequence[int] = (2, 4)
    ) -> Lowered:
        """The model lowered with a cache of the test's own."""
        return lower(self.archive(name), name, batches, folder, options=options)

    def __missing__(self, name: str) -> Lowered:
        archive = self.archive(name)
        with locked(archive.with_suffix(".lock")):
            self[name] = lower(archive, name, [2, 4], archive.parent / "cache")
        return self[name]


def made(name: str) -> nn.Module:
    """A model of `CASES` with the same weights every time."""
    make, _ = CASES[name]
    assert callable(make)
    torch.manual_seed(0)
    model = make()
    assert isinstance(model, nn.Module)
    return model.eval()


def contents(lowered: Lowered) -> list[object]:
    """All that was lowered, to be compared: a lowered model is equal to itself only."""
    return [getattr(lowered, field.name) for field in fields(lowered)]

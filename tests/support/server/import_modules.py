"""Modules that the tests of `cohabit import` import by name: `HERE:linear`. Some are refused."""

from typing import Any

import torch
from torch import nn

HERE = __name__
X = ("--input", "x:FP32:-1,4")
LINEAR = ("--factory", f"{HERE}:linear", "--input", "input:FP32:-1,4")


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Adding(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 2 * y


class Branching(nn.Module):
    """What it does depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Text(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": x * 2, "label": "cat"}


class InAList(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, ["cat", x]


class Floats(nn.Module):
    def forward(self, x: torch.Tensor) -> list[list[float]]:
        return x.tolist()  # type: ignore[no-any-return]


class Selected(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y[y > 0]


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


class OtherAfterExport(nn.Module):
    """Its exported program computes something else: all elements of `x`, and one element of `bytes`."""

    def __init__(self, floats: float = 3.0) -> None:
        super().__init__()
        self.floats = floats

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = (x[:, :1] * torch.ones(1 << 14)).abs().round()
        if torch.compiler.is_exporting():
            x, counts = x * self.floats, torch.cat([counts[:, :1] + 1, counts[:, 1:]], 1)
        return {"x": x, "bytes": counts.to(torch.uint8)}


class OtherIntegers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.round().int() + (1 if torch.compiler.is_exporting() else 0)


def other_integer_element() -> nn.Module:
    return OtherAfterExport(1.0)


class ParameterView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scaled": x * self.scale, "scale": self.scale.expand(x.shape[0], 4)}


class TwoRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 4)


class Centering(nn.Module):
    """Its rows influence one another, and it computes in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def scripted() -> nn.Module:
    return torch.jit.script(linear())


def traced() -> nn.Module:
    return torch.jit.trace(linear(), torch.zeros(1, 4))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def number() -> int:
    return 4


def failing() -> nn.Module:
    raise RuntimeError("no weights today\nand a second line\nand a third")


class IllConditioned(nn.Module):
    """Eager PyTorch loses digits, which its exported program has; with `error`, that is wrong as well."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.error if torch.compiler.is_exporting() else (x + 1e4) - 1e4


def ill_conditioned() -> nn.Module:
    return IllConditioned(0.0)


def ill_conditioned_and_wrong() -> nn.Module:
    return IllConditioned(0.03)


class Code:
    """A pickle of it calls something when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("loaded",)

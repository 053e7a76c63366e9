"""Programs made at random: views, aliases, in-place ops, shared weights, pads, norms, gates, tables and attention.

A program is a list of steps, each of four numbers: an op, two values that it takes, and a variant. Any list is one.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket, ShapeBuckets
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.interaction import comparable, difference
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import StoreKind
from tests.support.runtime.backends import opened
from tests.support.runtime.plans import streaming_plan

Tensor = torch.Tensor
Step = tuple[int, int, int, int]
WIDTH, CHANNELS, SIDE, IDS = 8, 4, 6, 5
LIMIT = 1e-4
"""Of an output's largest element."""
_STORES: tuple[StoreKind, ...] = ("ram", "file")


class Skipped(Exception):
    """A list of steps that eager PyTorch or its export does not take."""


class Generated(nn.Module):
    """A program of steps on rows [batch, length, 8], an image [batch, 4, 6, 6] and ids [batch, 5]."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=n != 1) for n in range(3))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.convs = nn.ModuleList(
            (
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
                nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False),
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
            )
        )
        self.valid = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, groups=g) for g in (1, CHANNELS))
        self.signal, self.up = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.ConvTranspose1d(WIDTH, WIDTH, 4, 2, 1)
        self.norm, self.rows_norm, self.groups = (
            nn.BatchNorm2d(CHANNELS),
            nn.LayerNorm(WIDTH),
            nn.GroupNorm(2, CHANNELS),
        )
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        nn.init.normal_(self.norm.running_mean)
        self.tables = nn.ModuleList(nn.Embedding(7 + n, WIDTH) for n in range(IDS))

    def forward(self, rows: Tensor, image: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        values = [self.linears[0](rows), self.convs[0](image), ids]
        for op, a, b, variant in self.steps:
            kind, step = OPS[op % len(OPS)]
            fitting = [v for v in values if kind(v)]
            if fitting:
                made = step(self, fitting[-1 - a % len(fitting)], fitting[-1 - b % len(fitting)], variant)
                values += [made] if isinstance(made, Tensor) else []
        return tuple(values[1:])


def is_rows(x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[-1] == WIDTH


def is_image(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1:] == (CHANNELS, SIDE, SIDE)


def is_float(x: Tensor) -> bool:
    return x.is_floating_point()


def is_ids(x: Tensor) -> bool:
    return x.dtype is torch.int64


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.relu, functional.relu6, functional.hardtanh, functional.hardsigmoid, functional.hardswish),
    *(functional.silu, functional.gelu, torch.tanh, torch.sigmoid, functional.leaky_relu),
    *(lambda x: x.clamp(-0.5, 1), lambda x: x.clamp(1, -1), lambda x: x.clamp(min=0), torch.neg, torch.abs),
)
CHANGES: tuple[Callable[[Tensor], object], ...] = (
    *(functional.relu_, torch.tanh_, torch.sigmoid_, lambda x: functional.silu(x, inplace=True), torch.neg_),
    *(lambda x: x.mul_(0.5), lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x.clamp_(-1, 1)),
    *(lambda x: x.masked_fill_(x > 0.5, -0.25), lambda x: x.fill_(0.75), lambda x: x.sub_(x.mean())),
)
PLACES: tuple[Callable[[Tensor], Tensor], ...] = (
    *(lambda x: x, lambda x: x[:, :2], lambda x: x[:, 1:], lambda x: x[:, 0], lambda x: x[..., :3]),
    *(lambda x: x[..., -1], lambda x: x[..., ::2], lambda x: x.transpose(1, -1), lambda x: x.flatten(1)),
    *(lambda x: x.chunk(2, -1)[1], lambda x: x.unbind(1)[0], lambda x: x.transpose(1, -1)[:, 2], lambda x: x[:1]),
    *(lambda x: x.unsqueeze(1)[..., 1:4], lambda x: x.diagonal(0, -2, -1), lambda x: x.view(x.shape)),
)


def change(m: Generated, x: Tensor, y: Tensor, k: int) -> None:
    CHANGES[k % len(CHANGES)](PLACES[k // len(CHANGES) % len(PLACES)](x))


def view(m: Generated, x: Tensor, y: Tensor, k: int) -> Tensor:
    return PLACES[k % len(PLACES)](x)


def gate(m: Generated, x: Tensor, y: Tensor, k: int) -> Tensor | None:
    u, v = x.chunk(2, -1)
    if k % 2:
        u.mul_(v.sigmoid())
        return None
    return torch.cat([u * torch.sigmoid(v), v], -1)


def attention(m: Generated, x: Tensor, y: Tensor, k: int) -> Tensor:
    if k % 8 == 7:
        x, y = x[:, :2], y[:, :2]
    shape = (*x.shape[:2], 2, WIDTH // 2)
    q, v = (m.linears[n](x).view(shape).transpose(1, 2) for n in (0, 2))
    key = m.linears[1](x).view(shape).transpose(1, 2)
    mask = (x[:, None, None, :, 0] > -1).expand(-1, 1, shape[1], -1) if k % 3 == 1 else None
    scale = 0.25 if k % 2 else None
    causal = k % 3 == 2
    out = functional.scaled_dot_product_attention(q, key, v, mask, is_causal=causal, scale=scale)
    return out.transpose(1, 2).reshape(x.shape)


def padded(m: Generated, x: Tensor, y: Tensor, k: int) -> Tensor:
    sides = ((1, 1, 1, 1), (0, 2, 1, 1), (2, 0, 0, 2))[k % 3]
    p = functional.pad(x, sides, value=0.0 if k % 5 else 0.5)
    if k % 2:
        x.mul_(0.5)
    return m.valid[k // 2 % 2](p)


def look_up(m: Generated, x: Tensor, y: Tensor, k: int) -> Tensor:
    first = k % 2
    found = [m.tables[n](x[:, n - (IDS if k % 3 == 0 else 0)]) for n in range(first, IDS)]
    if k % 4 == 3:
        x[:, 2:] = 1
    return torch.stack(found, 1) if k % 5 else torch.cat(found, -1).view(len(x), -1, WIDTH)


def residual(m: Generated, x: Tensor, y: Tensor, k: int) -> Tensor | None:
    if x.shape != y.shape:
        raise Skipped
    if k % 3 == 0:
        return functional.relu(m.convs[k % 2](x) + y) if is_image(x) else m.linears[k % 2](x) + y
    if k % 3 == 1:
        x += y
        return None
    return torch.add(x, y, alpha=0.5)


Made = Callable[[Generated, Tensor, Tensor, int], Tensor | None]
OPS: tuple[tuple[Callable[[Tensor], bool], Made], ...] = (
    (is_rows, lambda m, x, y, k: m.linears[k % 3](x)),
    (is_rows, lambda m, x, y, k: m.narrow(FUNCTIONS[k % len(FUNCTIONS)](m.wide(x)))),
    (is_rows, lambda m, x, y, k: FUNCTIONS[k % len(FUNCTIONS)](m.linears[k % 2](x))),
    (is_image, lambda m, x, y, k: m.convs[k % 3](x)),
    (is_image, lambda m, x, y, k: FUNCTIONS[k % len(FUNCTIONS)](m.norm(m.convs[k % 3](x)))),
    (is_image, lambda m, x, y, k: m.groups(x) if k % 2 else m.norm(x)),
    (is_rows, lambda m, x, y, k: m.rows_norm(x)),
    (is_float, lambda m, x, y, k: FUNCTIONS[k % len(FUNCTIONS)](x)),
    *((is_float, change),) * 4,
    *((is_float, view),) * 2,
    (is_float, residual),
    (is_image, residual),
    (is_rows, residual),
    (is_rows, gate),
    (is_rows, attention),
    (is_image, padded),
    (is_ids, look_up),
    (is_ids, lambda m, x, y, k: x + 0 if k % 2 else x.fill_(k % 5)),
    (is_rows, lambda m, x, y, k: m.signal(x.transpose(1, 2)).transpose(1, 2)),
    (is_rows, lambda m, x, y, k: m.up(x[:, :3].transpose(1, 2)).transpose(1, 2)),
    (is_float, lambda m, x, y, k: x.clone() if k % 2 else torch.cat([x, x * 2], -1)),
    (is_float, lambda m, x, y, k: x.copy_(y) if x.shape == y.shape else None),
    (is_image, lambda m, x, y, k: functional.max_pool2d(x, 2).flatten(2) if k % 2 else x.mean((2, 3))),
    (is_image, lambda m, x, y, k: x.flatten(2).softmax(-1) if k % 2 else x.flatten(2).cumsum(-1) * 0.1),
)


def inputs(batch: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, length, WIDTH, generator=generator)
    image = torch.randn(batch, CHANNELS, SIDE, SIDE, generator=generator)
    return rows, image, torch.randint(0, 7, (batch, IDS), generator=generator)


def differences(steps: Sequence[Step], *, dynamic: bool, packed: bool) -> Iterator[str]:
    """Yield how a lowered program differs from eager PyTorch, at three budgets and from two stores. Raises Skipped."""
    torch.manual_seed(0)
    model = Generated(steps).eval()
    given = inputs(2, 5, 1)
    shapes = ({0: (batch := Dim("batch", max=4)), 1: Dim("length", min=4, max=6)}, {0: batch}, {0: batch})
    try:
        with torch.no_grad():
            model(*(t.clone() for t in given))
            program = torch.export.export(
                model, tuple(t.clone() for t in given), dynamic_shapes=shapes if dynamic else None
            )
    except Exception as error:  # torch raises whatever its tracer raises
        raise Skipped(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        torch.export.save(program, path / "model.pt2")
        try:
            lowered = lower(
                path / "model.pt2",
                "generated",
                [1, 2] if dynamic else [2],
                path / "cache",
                options=Options(packed=packed),
                shape_buckets=ShapeBuckets((5, 6)),
            )
        except UnsupportedModel as error:
            if any(expected in str(error) for expected in EXPECTED):
                raise Skipped(str(error)) from error
            yield f"refused: {error}"
            return
        assert lowered.validation is not None
        yield from (f"left out: {left_out}" for left_out in lowered.validation.left_out)
        yield from _at_every_budget(model, lowered, given)


EXPECTED = (
    "is not the same at all sizes",
    "was exported under the condition",
    "without the batch in front",
    "sizes can depend on the batch in",
)
"""What is refused for its shapes, by name."""


def _at_every_budget(model: Generated, lowered: Lowered, given: Sequence[Tensor]) -> Iterator[str]:
    bucket = next(b for b in lowered.buckets if b.batch == 2)
    with torch.no_grad():
        expected = [comparable(t.clone()) for t in model(*(t.clone() for t in given))]
    with opened(CpuBackend, lowered) as bench:
        graph = lowered.graphs[bucket]
        for kind in _STORES:
            store = bench.backend.open_store(kind, lowered.weights_path, lowered.manifest)
            for budget, plan in _plans(graph).items():
                found: list[Any] = bench.executor.run(
                    bench.program(plan, store), [t.clone() for t in given]
                ).outputs
                for n, (own, other) in enumerate(zip(map(comparable, found), expected, strict=True)):
                    share = difference(own, other, other) if own.shape == other.shape else torch.inf
                    if not share <= LIMIT:
                        yield f"output {n} differs by {share:.2g}, {budget}, from {kind}"
            store.close()


def _plans(graph: Graph) -> dict[str, Plan]:
    half = frozenset(graph.parameters[::2])
    return {
        "all resident": resident_plan(graph),
        "half resident": streaming_plan(graph, half),
        "none resident": streaming_plan(graph),
    }


__all__ = ["Bucket", "Generated", "Skipped", "Step", "differences"]

"""Models that change tensors in place, and layers of odd form, compute what eager PyTorch computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional
from torch.utils import _pytree as pytree

from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering import fusion, packing
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.lowering.rewrites.functional import is_change, write_once
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.support.runtime.backends import cpu, opened

pytestmark = pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))
Forward = Callable[["Parts", torch.Tensor], Any]


class Parts(nn.Module):
    """Layers for images [4, 6, 6] and their rows of 6."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4)
        self.norm, self.signal_norm = nn.BatchNorm2d(4), nn.BatchNorm1d(4)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        nn.init.normal_(self.signal_norm.running_mean)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.table, self.tables = nn.Embedding(9, 6), nn.ModuleList(nn.Embedding(9 + n, 6) for n in range(5))
        self.scale = nn.Parameter(torch.randn(6))
        self.pattern = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.pattern(self, x)


def written(
    change: Callable[[torch.Tensor], object], read: Forward, made: Forward = lambda m, x: m.a(x)
) -> Forward:
    """Something is read, changed, and read again."""

    def forward(m: Parts, x: torch.Tensor) -> Any:
        h = made(m, x)
        before = read(m, h)
        change(h)
        return before, read(m, h), h

    return forward


def set_to(value: Any, *where: Any) -> Callable[[torch.Tensor], object]:
    return lambda h: h.__setitem__(where, value)


def gate(h: torch.Tensor) -> None:
    u, v = h.chunk(2, -1)
    u.mul_(v.sigmoid())


def swap(m: Parts, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    left, right = h[..., :3], h[..., 3:]
    kept = left.clone()
    left.copy_(right)
    right.copy_(kept)
    return m.b(h)


def overlap(m: Parts, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h[..., 1:].add_(h[..., :-1].clone())
    h[..., 0] += h[..., 5]
    return h


def views_of_views(m: Parts, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = m.a(x)
    t = h.transpose(-1, -2)
    row = t[..., 2, :]
    flat = h.view(h.shape[0], -1)
    row.exp_()
    flat[:, 5:9] = -1
    t.mul_(2)
    return h, t.sum(-1), row, flat


def residual_overwritten(m: Parts, x: torch.Tensor) -> torch.Tensor:
    r = m.conv(x)
    y = m.norm(m.conv(functional.relu(r, inplace=True)))
    y += r
    r.zero_()
    return functional.silu(y, inplace=True) + r


def accumulated(m: Parts, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for layer in (m.a, m.b, m.c):
        total += layer(x)
        total[..., 0] = 1
    return total


def padded_then_changed(m: Parts, x: torch.Tensor) -> Any:
    h = m.conv(x)
    p = functional.pad(h, (1, 1, 1, 1))
    h[:, :2] = 0
    return m.depthwise(p), h


def ids_of(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0, 0].abs() * 3).long().clamp(max=8)


def ids_changed(m: Parts, x: torch.Tensor) -> torch.Tensor:
    ids = ids_of(x)
    rows = [m.tables[n](ids[:, n]) for n in range(5)]
    ids.fill_(1)
    return torch.stack([*rows, m.table(ids[:, 0])], 1)


def columns_from_the_end(m: Parts, x: torch.Tensor) -> torch.Tensor:
    ids = ids_of(x)
    return torch.cat([m.tables[n](ids[:, n - 5]) for n in range(5)], -1)


def norm_without_a_batch(m: Parts, x: torch.Tensor) -> torch.Tensor:
    return m.signal_norm(functional.conv1d(x[0, 0], m.b.weight[:4, :6, None].expand(4, 6, 1), None)[:, :4])


def rows_of_a_cache(m: Parts, x: torch.Tensor) -> torch.Tensor:
    cache = torch.zeros(x.shape[0], 3, 6)
    cache[:, 1] = m.a(x)[:, 0, 0]
    cache[:, 2].copy_(cache[:, 1])
    cache[0].add_(1)
    return functional.relu_(m.b(cache))


def mask_made_in_place(m: Parts, x: torch.Tensor) -> torch.Tensor:
    mask = torch.full((6, 6), float("-inf")).triu_(1)
    mask[0, 1] = 0.0
    return (m.a(x) + mask).softmax(-1)


def outputs_of_one_value(m: Parts, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = m.a(x)
    part, flat = h[..., :4], h.view(h.shape[0], -1)
    h.tanh_()
    return part, flat, h


def another_type(m: Parts, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h.mul_(torch.tensor(2.0, dtype=torch.float64))
    return h.ge_(0.5)


CASES: dict[str, Forward] = {
    "rows of a cache": rows_of_a_cache,
    "a mask": mask_made_in_place,
    "outputs of one value": outputs_of_one_value,
    "a type that an out-of-place op would change": another_type,
    "a view of a convolution's rows": lambda m, x: m.conv(x).view(x.shape[0], 24, 6).sum(-1),
    "a view of a convolution that is changed": lambda m, x: (lambda h: (h.view(h.shape[0], -1)[:, 1:5].zero_(), h))(
        m.conv(x)
    ),
    "itself": written(lambda h: h.add_(h), lambda m, h: m.b(h)),
    "itself, rolled": written(lambda h: h.copy_(torch.roll(h, 1, -1)), lambda m, h: m.b(h)),
    "a slice": written(set_to(0, ..., slice(0, 2)), lambda m, h: m.b(h).view(h.shape)),
    "a column from the end": written(set_to(3.5, ..., -1), lambda m, h: m.b(h)),
    "every second row": written(set_to(-1, slice(None), slice(0, None, 2)), lambda m, h: m.b(h)),
    "one element": written(set_to(9, 0, 1, 2, 3), lambda m, h: m.b(h)),
    "where a mask holds": written(lambda h: h.masked_fill_(h > 0, -2.0), lambda m, h: m.b(h)),
    "by a boolean index": written(lambda h: h.__setitem__(h < 0, 0.5), lambda m, h: m.b(h)),
    "by indices": written(lambda h: h.index_fill_(3, torch.tensor([1, 4]), 2.0), lambda m, h: m.b(h)),
    "half of it, gated by the other": written(gate, lambda m, h: m.b(h)),
    "all of it": written(lambda h: h.mul_(-1).add_(1).clamp_(0, 1), lambda m, h: m.b(h)),
    "through a transposed view": written(lambda h: h.transpose(1, 2)[:, 0].neg_(), lambda m, h: m.b(h)),
    "through a diagonal": written(lambda h: h.diagonal(0, 2, 3).fill_(0), lambda m, h: m.b(h)),
    "an image before its padding is read": padded_then_changed,
    "halves that change places": swap,
    "parts that overlap": overlap,
    "views of views": views_of_views,
    "a residual": residual_overwritten,
    "a sum that grows": accumulated,
    "ids between look-ups": ids_changed,
    "columns from the end": columns_from_the_end,
    "a norm after a convolution without a batch": norm_without_a_batch,
    "a weight's value": written(set_to(0, 0), lambda m, h: h * 2, lambda m, x: m.scale * 2 + 0 * x[:, 0, 0]),
    "a weight of one dimension": lambda m, x: functional.linear(x, m.scale) + functional.linear(x, m.scale * 2),
    "a bias for all": lambda m, x: functional.linear(x, m.a.weight, m.scale[:1]),
    "a bound above the other": lambda m, x: (m.conv(x).clamp(2, -1), m.a(x).clamp(1, 0)),
    "a slice of an expanded sum": lambda m, x: (m.a(x[:, :1]) + x).narrow(1, 0, 2).mul_(3),
    "a swapped pair": lambda m, x: (lambda h: (h.unbind(1)[0].sub_(h[:, 1]), h)[1])(m.a(x)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_program_that_changes_what_it_reads_equals_eager(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    torch.manual_seed(0)
    model, x = Parts(CASES[name]).eval(), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        expected = pytree.tree_leaves(model(x.clone()))
    torch.export.save(program, tmp_path / "model.pt2")
    for options in (Options(), Options(packed=True)):
        lowered = lower(tmp_path / "model.pt2", name, [2], tmp_path / "cache", options=options)
        assert lowered.validation is not None
        assert lowered.validation.left_out == (), "no rewrite has to be left out"
        with opened(cpu, lowered) as bench:
            found = bench.executor.run(bench.program(resident_plan(bench.graph)), [x.clone()]).outputs
            for own, other in zip(found, expected, strict=True):
                torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)


class Changing(nn.Module):
    """Changes one of its inputs, and returns what it reads of it."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x[:, :2] = 0
        x += 1
        return x * scale


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale


def test_an_input_that_the_program_changes_is_named_and_kept(tmp_path: Path) -> None:
    inputs = torch.randn(2, 4), torch.randn(2, 4)
    program = torch.export.export(Changing(), tuple(t.clone() for t in inputs))
    torch.export.save(program, tmp_path / "model.pt2")
    lowered = lower(tmp_path / "model.pt2", "changing", [2], tmp_path / "cache")
    assert lowered.changed_inputs == ("x",)
    assert lower(tmp_path / "model.pt2", "changing", [2], tmp_path / "cache").changed_inputs == ("x",)
    graph = lowered.graphs[Bucket(2)]
    assert not any(graph.tensors[t].kind == "input" for op in graph.ops for t in op.mutates)
    with opened(cpu, lowered) as bench:
        given = [t.clone() for t in inputs]
        (found,) = bench.executor.run(bench.program(resident_plan(bench.graph)), given).outputs
        assert torch.equal(found, Changing()(*(t.clone() for t in inputs)))
        assert torch.equal(given[0], inputs[0])


def test_inputs_that_are_lent_take_none_of_the_workspace(tmp_path: Path) -> None:
    inputs = torch.randn(2, 4096), torch.randn(2, 4096)
    torch.export.save(torch.export.export(Scaled(), inputs), tmp_path / "model.pt2")
    lowered = lower(tmp_path / "model.pt2", "scaled", [2], tmp_path / "cache")
    lent = lowered.lent(["scale"])
    before, after = (each.graphs[Bucket(2)] for each in (lowered, lent))
    assert before.fingerprint != after.fingerprint
    assert peak_activation_bytes(before) - peak_activation_bytes(after) == inputs[1].nbytes
    assert lowered.lent(["none"]) is lowered
    with opened(cpu, lent) as bench:
        (found,) = bench.executor.run(bench.program(resident_plan(bench.graph)), list(inputs)).outputs
        assert torch.equal(found, inputs[0] * inputs[1])


def masked(m: Parts, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    h[..., :2] = 0
    h[..., 2].add_(1)
    h.masked_fill_(h > 1, 0.5)
    return functional.relu_(h)


def activated(m: Parts, x: torch.Tensor) -> torch.Tensor:
    h = functional.relu_(m.norm(m.conv(x)))
    y = m.conv(h)
    y += h
    return functional.hardtanh_(y).mul_(2)


@pytest.mark.long
@pytest.mark.parametrize(("forward", "ops", "values"), [(masked, 6, 2), (activated, 6, 2)])
def test_a_program_that_works_in_place_keeps_its_ops_and_its_memory(
    forward: Forward, ops: int, values: int, tmp_path: Path
) -> None:
    x = torch.randn(3, 4, 6, 6)
    with torch.no_grad():
        program = torch.export.export(Parts(forward).eval(), (x,), dynamic_shapes=({0: Dim("batch", max=8)},))
    torch.export.save(program, tmp_path / "model.pt2")
    graph = lower(tmp_path / "model.pt2", "in place", [2], tmp_path / "cache").graphs[Bucket(2)]
    assert len(graph.ops) == ops
    assert peak_activation_bytes(graph) - graph.ops[0].scratch_bytes <= values * 2 * x[0].nbytes + 8


def test_plain_changes_need_no_second_trace() -> None:
    x = torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        plain, other = (torch.export.export(Parts(f).eval(), (x,)).graph for f in (activated, masked))
    assert write_once(plain)
    assert not any(map(is_change, plain.nodes))
    before = [node.target for node in other.nodes]
    assert not write_once(other), "a slice is another name of what is changed"
    assert [node.target for node in other.nodes] == before


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, mode="mean")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bag(ids)


def test_bags_of_a_dynamic_batch_and_length_are_a_batch(tmp_path: Path) -> None:
    shapes = ({0: Dim("batch", max=8), 1: Dim("length", max=16)},)
    ids, model = torch.randint(0, 20, (3, 5)), Bag()
    torch.export.save(torch.export.export(model, (ids,), dynamic_shapes=shapes), tmp_path / "model.pt2")
    lowered = lower(tmp_path / "model.pt2", "bag", [1, 2], tmp_path / "cache")
    assert lowered.outputs[0].shape == (None, 4)
    assert lowered.batches == (2,), "export has left out a batch of 1"

"""Lowered programs compute what eager PyTorch computes, whatever is resident."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering import fusion
from cohabit.runtime.lowering.lower import Lowered, NotCached, cached, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import StoreKind, open_store
from tests.support.runtime import models
from tests.support.runtime.plans import streaming_plan


def real_inputs(examples: dict[str, torch.Tensor], batch: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name, example in examples.items():
        shape = (batch, *example.shape[1:])
        if example.dtype.is_floating_point:
            inputs[name] = torch.randn(shape, generator=generator)
        else:
            inputs[name] = torch.randint(0, 2, shape, generator=generator).to(example.dtype)
    return inputs


def run(
    lowered: Lowered, batch: int, inputs: dict[str, torch.Tensor], streaming: bool, kind: StoreKind
) -> list[torch.Tensor]:
    graph = lowered.graphs[Bucket(batch)]
    plan = streaming_plan(graph) if streaming else resident_plan(graph)
    store = open_store(kind, lowered.weights_path, lowered.manifest)
    with CpuArena(plan.memory.nbytes) as arena, CpuExecutor() as executor:
        program = build(lowered, plan, None, arena, Bases(0, plan.memory.partition_bytes), store)
        executor.load(program)
        for _ in range(3):
            copies = [inputs[p.name].clone() for p in lowered.inputs]
            outputs = executor.run(program, copies).outputs
    store.close()
    return outputs


@pytest.mark.parametrize("options", [Options(), Options(packed=True)], ids=["plain", "packed"])
@pytest.mark.parametrize("name", models.CASES)
def test_every_construct_equals_eager_at_two_batches_and_is_read_back_as_it_was_lowered(
    name: str, options: Options, constructs: models.Constructs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    model, examples = models.made(name), models.CASES[name][1]
    lowered = constructs.lowered(name, tmp_path, options, [1, 4])
    assert lowered.batches == (1, 4)
    assert (lowered.interaction is None) == (name not in ("branch", "scalar")), "rounding is no influence"
    for batch in lowered.batches:
        inputs = real_inputs(examples, batch)
        with torch.no_grad():
            expected = pytree.tree_leaves(model(**{k: v.clone() for k, v in inputs.items()}))
        resident = run(lowered, batch, inputs, streaming=False, kind="ram")
        streamed = run(lowered, batch, inputs, streaming=True, kind="file")
        assert len(resident) == len(expected) == len(lowered.outputs)
        for want, kept, swapped in zip(expected, resident, streamed, strict=True):
            torch.testing.assert_close(kept, want, atol=1e-4 * float(want.abs().max()), rtol=0)
            assert torch.equal(kept, swapped), "the same bits at every budget"
    again = constructs.lowered(name, tmp_path, options, [1, 4])
    assert list(tmp_path.glob("*/program-*.json"))
    if name != "branch":  # sub-programs have no equality; tests/hostile runs them
        assert models.contents(again) == models.contents(lowered)
    assert again.graphs == lowered.graphs


@pytest.mark.long
def test_outputs_are_named_by_the_structure_that_the_model_returns(constructs: models.Constructs) -> None:
    names = {case: [p.name for p in constructs[case].outputs] for case in ("wide", "tied", "attention", "lstm")}
    assert names == {
        "wide": ["output"],
        "tied": ["logits", "hidden"],
        "attention": ["z", "parts_0", "parts_1"],
        "lstm": ["output_0", "output_1"],
    }


def test_large_tables_stay_in_the_host_store(constructs: models.Constructs) -> None:
    lowered = constructs["tied"]
    assert [t.shape for t in lowered.manifest.tables] == [(9000, 96)]
    pieces = [p.name for s in lowered.manifest.segments for p in s.pieces]
    assert sum("mix" in name and "weight" in name for name in pieces) == 1, "tied weights are stored once"
    assert [t.shape for t in constructs["bags"].manifest.tables] == [(9000, 40)] * 3
    assert constructs["bags"].manifest.segment_bytes == 0


def test_what_depends_on_weights_alone_is_computed_once_unless_the_weights_grow(
    constructs: models.Constructs,
) -> None:
    targets = [op.target for op in constructs["fixed_weights"].graphs[Bucket(2)].ops]
    assert {"aten._weight_norm.default", "aten.exp.default"}.isdisjoint(targets)
    assert "aten.mul.Tensor" in targets, "a product of two vectors"
    assert "aten.sin.default" in targets, "its operand is stored anyway"


class Positions(torch.nn.Module):
    """The angles of a rotary embedding and a causal mask: of a fixed length, and of no input but the batch's size."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.register_buffer("rates", torch.rand(4))
        self.by_row = by_row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        x = x * (places[:, None] * self.rates).cos()
        rows = torch.arange(x.shape[0])[:, None, None]
        kept = places[:, None] < torch.arange(4) + (rows if self.by_row else 0 * rows)
        return x.masked_fill(kept, 0.0)


@pytest.mark.parametrize("by_row", [False, True])
def test_small_constants_of_a_fixed_length_are_computed_once(by_row: bool, tmp_path: Path) -> None:
    model = Positions(by_row=by_row)
    lowered = models.lowered(model, {"x": torch.zeros(3, 6, 4)}, tmp_path, "positions", [1, 2])
    targets = [op.target for op in lowered.graphs[Bucket(2)].ops]
    once = ["aten.mul.Tensor", "aten.masked_fill_.Scalar"]
    assert (targets == once) == (not by_row), "what differs from row to row is computed for each batch"
    for batch in (1, 2):
        inputs = {"x": torch.randn(batch, 6, 4)}
        (answer,) = run(lowered, batch, inputs, streaming=True, kind="ram")
        torch.testing.assert_close(answer, model(**inputs), atol=1e-6, rtol=0)


def test_batch_norms_are_folded_where_they_follow_a_convolution_alone(constructs: models.Constructs) -> None:
    lowered = constructs["conv_norm"]
    targets = [op.target for op in lowered.graphs[Bucket(2)].ops]
    assert targets.count("aten.batch_norm.default") == 1, "the one behind a result that is used twice stays"


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_batch_norms_behind_padding_by_word_are_folded_too(padding: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, (3, 5), padding=padding, dilation=2), torch.nn.BatchNorm2d(4))
    graph = models.lowered(model, {"input": torch.zeros(3, 3, 12, 12)}, tmp_path, "padded", [1]).graphs[Bucket(1)]
    assert [op.target for op in graph.ops] == ["aten.conv2d.default"]


def test_layers_with_a_large_share_of_the_weights_are_split(constructs: models.Constructs) -> None:
    lowered = constructs["large_layers"]
    targets = [op.target for op in lowered.graphs[Bucket(2)].ops]
    assert targets.count("aten.conv1d.default") > 4
    assert targets.count("aten.linear.default") == 3
    assert targets.count("aten.conv2d.default") == 1, "the grouped one stays whole"
    largest = max(s.nbytes for s in lowered.manifest.segments)
    assert largest <= lowered.manifest.segment_bytes / 8 + 4096


class Logits(torch.nn.Module):
    """Many numbers for each of 50 places, by a layer that is computed in parts."""

    def __init__(self, *, added: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 6000)
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + 1 if self.added else torch.tanh(self.head(x))


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("options", [Options(), Options(packed=True)], ids=["plain", "packed"])
def test_parts_of_a_large_result_are_written_into_it_one_by_one(
    options: Options, added: bool, tmp_path: Path
) -> None:
    model = Logits(added=added)
    lowered = models.lowered(model, {"x": torch.zeros(3, 50, 64)}, tmp_path, "logits", [1, 2], options=options)
    graph = lowered.graphs[Bucket(2)]
    targets = [op.target for op in graph.ops]
    whole = sum(graph.tensors[t].nbytes for t in graph.outputs)
    assert targets.count("aten.copy_.default") == (0 if added else 3)
    assert (peak_activation_bytes(graph) < 1.5 * whole) == (not added), "what can be overwritten is joined, as ever"
    for batch in (1, 2):
        inputs = {"x": torch.randn(batch, 50, 64)}
        answers = [run(lowered, batch, inputs, streaming=s, kind="ram")[0] for s in (False, True)]
        torch.testing.assert_close(answers[0], model(**inputs), atol=1e-5, rtol=0)
        assert torch.equal(*answers), "the same bits at every budget"


@pytest.mark.parametrize("name", ["experts", "integer_weights"])
def test_experts_and_integer_weights_are_computed_in_parts(name: str, constructs: models.Constructs) -> None:
    graph = constructs[name].graphs[Bucket(2)]
    read = [sum(graph.tensors[t].nbytes for t in op.reads if graph.tensors[t].is_weight) for op in graph.ops]
    whole = [op.target for op, nbytes in zip(graph.ops, read, strict=True) if nbytes > graph.weight_bytes / 5]
    assert whole == (["aten.einsum.default"] if name == "experts" else []), "the sum over the experts stays whole"
    made = [sum(graph.tensors[t].nbytes for t in op.writes) for op in graph.ops]
    assert max(made) < graph.weight_bytes, "floats of a whole weight would be twice as much"


@pytest.mark.long
def test_each_direction_of_a_recurrent_layer_is_an_op(tmp_path: Path) -> None:
    model = models.Recurrent("GRU", True)
    model.rnn = torch.nn.GRU(64, 96, 3, batch_first=True, bidirectional=True)
    graph = models.lowered(model, {"x": torch.zeros(3, 5, 64)}, tmp_path, "gru", [1]).graphs[Bucket(1)]
    calls = [op for op in graph.ops if op.target == "aten.gru.input"]
    read = [{t for t in op.reads if graph.tensors[t].is_weight} for op in calls]
    assert len(calls) == 2 * 3
    assert sum(map(len, read)) == len(set().union(*read)), "each reads its own weights"


def test_elementwise_ops_overwrite_operands_that_die(constructs: models.Constructs) -> None:
    graph = constructs["residual"].graphs[Bucket(2)]
    targets = [op.target.removeprefix("aten.") for op in graph.ops]
    assert "relu.default" in targets, "relu(y): y is read again"
    assert "tanh_.default" in targets, "tanh(b(y)): b(y) is not"
    assert "add.Tensor" in targets, "c(z) + z: c(z) is broadcast"
    assert "mul.Tensor" in targets, "twice * twice: read twice by one op"
    assert "relu_.default" in targets
    assert "sigmoid_.default" in targets


@pytest.mark.long
def test_in_place_ops_are_marked_with_what_they_change(constructs: models.Constructs) -> None:
    graph = constructs["in_place"].graphs[Bucket(2)]
    changed = {op.target: [graph.tensors[i].kind for i in op.mutates] for op in graph.ops if op.mutates}
    assert changed["aten.relu_.default"] == ["activation"]
    assert changed["aten.fill_.Tensor"] == ["activation"], "through a view"


def test_what_was_lowered_for_other_batch_sizes_is_not_called_damaged(
    constructs: models.Constructs, tmp_path: Path
) -> None:
    lowered = constructs.lowered("wide", tmp_path, batches=[1])
    with pytest.raises(NotCached, match="it was lowered for other batch sizes or shape buckets only"):
        cached(lowered.archive, "wide", [1, 2], tmp_path, lowered.options)
    with pytest.raises(NotCached, match="the cache has no undamaged copy of it"):
        cached("0" * 64, "wide", [1], tmp_path, lowered.options)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format_version": 1}', b'{"format_version": 99}'])
def test_a_damaged_cache_is_made_again(damage: bytes, constructs: models.Constructs, tmp_path: Path) -> None:
    before = constructs.lowered("wide", tmp_path, batches=[1])
    for pattern in ("program-*.json", "weights-*.json"):
        (file,) = tmp_path.glob(f"*/{pattern}")
        file.write_bytes(damage)
        assert constructs.lowered("wide", tmp_path, batches=[1]).graphs == before.graphs


def test_a_flipped_bit_in_the_weights_file_is_found_and_mended(
    constructs: models.Constructs, tmp_path: Path
) -> None:
    before = constructs.lowered("wide", tmp_path, batches=[1])
    sound = before.weights_path.read_bytes()
    for position in (0, len(sound) // 2, len(sound) - 1):
        damaged = bytearray(sound)
        damaged[position] ^= 1
        before.weights_path.write_bytes(damaged)
        constructs.lowered("wide", tmp_path, batches=[1])
        assert before.weights_path.read_bytes() == sound


def test_kernel_scratch_is_part_of_an_op_s_memory(constructs: models.Constructs) -> None:
    graph = constructs["large_layers"].graphs[Bucket(2)]
    scratch = {op.target: op.scratch_bytes for op in graph.ops}
    assert scratch["aten.conv1d.default"] > 0, "convolutions repack what they read"
    assert scratch["aten.relu_.default"] == 0


@pytest.mark.long
def test_a_relu_behind_the_model_s_own_sum_makes_no_bytes(constructs: models.Constructs) -> None:
    graph = constructs["own_sums"].graphs[Bucket(2)]
    targets = [op.target for op in graph.ops]
    first_sum = targets.index("aten.add_.Tensor")
    assert targets[first_sum + 1] == "aten.relu_.default"
    assert all(not op.writes for op in graph.ops[first_sum : first_sum + 2])
    changed = [op for op in graph.ops if op.target == "aten.mul_.Tensor"]
    assert changed, "a result that is read before it is changed is changed where it is, as the model says"


class Stateful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Selecting(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + x


class SameNames(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"a": {"b": x * 2}, "a_b": x * 3}


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Stateful, "has no state"), (Selecting, "depends on values"), (SameNames, "several outputs are called a_b")],
)
def test_what_cannot_be_promised_is_refused_with_the_reason(
    make: Callable[[], torch.nn.Module], reason: str, tmp_path: Path
) -> None:
    models.export(make(), {"x": torch.ones(3, 4)}, tmp_path / "model.pt2")
    with pytest.raises(UnsupportedModel, match=reason):
        lower(tmp_path / "model.pt2", "refused", [1], tmp_path / "cache")


class Stateless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_program_of_fixed_shape_is_served_at_that_shape(tmp_path: Path) -> None:
    lowered = models.lowered(Stateless(), {"x": torch.ones(3, 4)}, tmp_path, "fixed", [1, 2], dynamic=False)
    assert not lowered.batched
    assert lowered.batches == (3,)
    assert lowered.inputs[0].shape == (3, 4)

"""A model's program over several devices: its layers as operators of `planner.tiling`.

Activations are matrices of tokens by features. Linear layers are dots, embeddings and attention join_updates; ops
that are not known here read whole activations, so the bytes of a plan are never too few."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from cohabit.planner.tiling.arrays import (
    Expression,
    Join,
    JoinUpdate,
    LazyArray,
    Map,
    NewArray,
    Shape,
    dot,
    newarray,
)
from cohabit.planner.tiling.graph import Tiling, TilingGraph, Way
from cohabit.planner.tiling.search import TilingPlan
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering import archive
from cohabit.runtime.lowering.archive_file import ArchiveFile

MOST_TOKENS = 128
"""Length of dynamic dimensions other than the batch, unless the model allows less."""

_aten = torch.ops.aten
_BY_ROWS = (_aten.layer_norm.default, _aten.softmax.int, _aten.rms_norm.default)


@dataclass(frozen=True, slots=True)
class ModelProgram:
    outputs: tuple[LazyArray, ...]
    weight_bytes: int


def read_model(path: Path, batch: int, devices: int) -> ModelProgram:
    """Read a .pt2 archive as a program. Raises ArchiveError, and UnsupportedModel for layers that are not known."""
    with ArchiveFile(path) as opened:
        program, _ = archive.read(opened)
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    sizes = {symbol: int(min(r.upper, MOST_TOKENS)) for symbol, r in program.range_constraints.items()}
    arrays: dict[fx.Node, LazyArray] = {}
    weights: list[LazyArray] = []
    first = next(n for n in program.graph.nodes if kinds.get(n.name) == InputKind.USER_INPUT)
    length = first.meta["val"].shape[0]
    if not isinstance(length, int):
        sizes[length.node.expr] = batch

    def shape_of(node: fx.Node) -> tuple[int, int]:
        dims = [int(d) if isinstance(d, int) else int(d.node.expr.subs(sizes)) for d in node.meta["val"].shape] or [
            1
        ]
        return math.prod(dims[:-1]), dims[-1]

    def weight(node: fx.Node, is_transposed: bool = False) -> LazyArray:
        value = node.meta["val"]
        shape = tuple(reversed(value.shape)) if is_transposed else tuple(value.shape)
        dtype = torch.empty(0, dtype=value.dtype).to(
            torch.float32 if value.dtype == torch.bfloat16 else value.dtype
        )
        weights.append(newarray(shape, dtype.numpy().dtype, name=node.name.removeprefix("p_")))
        return weights[-1]

    for node in program.graph.nodes:
        value = node.meta.get("val")
        if (
            node.op == "placeholder"
            and kinds[node.name] == InputKind.USER_INPUT
            and isinstance(value, torch.Tensor)
        ):
            arrays[node] = newarray(shape_of(node), name=node.name)
        elif node.op == "call_function" and isinstance(value, torch.Tensor):
            arrays[node] = _layer(node, arrays, shape_of(node), weight, devices)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    results = tuple(arrays[n] for n in output.all_input_nodes if n in arrays)
    return ModelProgram(results, sum(w.expression.nbytes for w in weights))


def _layer(
    node: fx.Node,
    arrays: dict[fx.Node, LazyArray],
    shape: tuple[int, int],
    weight: Callable[..., LazyArray],
    devices: int,
) -> LazyArray:
    """Return the array that a call of the program makes."""
    inputs = [arrays[n] for n in node.all_input_nodes if n in arrays]
    target = node.target
    if target == _aten.linear.default:
        kernel, x = weight(node.args[1], True), inputs[0]
        if x.shape[-1] != kernel.shape[0]:  # its features were tokens, or heads
            x = _join("reshape", [x], (shape[0], kernel.shape[0]))
        result = dot(x, kernel)
        return result + weight(node.args[2]) if len(node.args) > 2 and node.args[2] is not None else result
    if target == _aten.embedding.default:
        # By columns, or by rows of which each device knows some and the others add zeros.
        return _join("embedding", [weight(node.args[0])], shape, Join((1,), 1), Join((0,), "partial"))
    if target == _aten.scaled_dot_product_attention.default:
        heads = int(node.meta["val"].shape[1])
        ways = [Join((1,) * 3 + (None,) * (len(inputs) - 3), 1)] if heads % devices == 0 else []
        return _join("attention", inputs, inputs[0].shape, *ways)
    if target in _BY_ROWS:
        return _join("norm", inputs, shape, Join((0,), 0))
    if not inputs:  # a constant, or a table that is read as it is
        return newarray(shape, name=node.name)
    is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    unread = [n.name for n in node.all_input_nodes if n not in arrays and n.op == "placeholder"]
    if unread and not is_pointwise:
        raise UnsupportedModel(
            f"{node.name} ({target}) reads {unread[0]}; over several devices, only linear layers, embeddings, attention"
            " and norms may have weights"
        )
    alike = [x for x in inputs if x.size == math.prod(shape)]
    if is_pointwise and alike:
        alike = [x for x in alike if x.shape == alike[0].shape]
        operator = Map(node.name, (None,) * len(alike))
        return LazyArray(Expression(operator, tuple(x.expression for x in alike), alike[0].shape, alike[0].dtype))
    if len(inputs) == 1 and alike:
        return alike[0]  # a view, or a copy in another order: heads stay in their columns
    return _join("whole", inputs, shape)


def _join(function: str, inputs: Sequence[LazyArray], shape: Shape, *ways: Join) -> LazyArray:
    expressions = tuple(x.expression for x in inputs)
    operator = JoinUpdate(function, (*ways, Join((None,) * len(inputs), None)))
    return LazyArray(Expression(operator, expressions, shape, newarray((1,)).dtype))


def by_hand(model: ModelProgram, devices: int) -> TilingPlan:
    """Tile as Megatron-LM does (Shoeybi et al., 2019): layers by columns and by rows in turn.

    Activations between such pairs are on all devices, and each pair ends with an all-reduce. The largest embedding is
    split by rows of the vocabulary; other embeddings and the weights of norms are on all devices.
    """
    graph = TilingGraph.of(model.outputs, devices, model.weight_bytes, frees_results=True)
    tables = [e.inputs[0] for e in graph.expressions if _is_embedding(e)]
    largest = max(tables, key=lambda table: table.nbytes, default=None)
    picks = [0] * len(graph.groups)
    split: dict[int, bool] = {}
    """Whether a result's features are split."""

    def pick(expression: Expression, name: str) -> None:
        group = graph.group_of(expression)
        offered = [c.name for c in graph.groups[group].choices if isinstance(c, Tiling)]
        picks[group] = offered.index(name) if name in offered else 0

    for expression in graph.expressions:
        sources, operator = expression.inputs, expression.operator
        activations = [split[id(s)] for s in sources if id(s) in split]
        is_split = bool(activations) and all(activations)
        if isinstance(operator, NewArray):
            pick(expression, "replicated")
            continue
        if isinstance(operator, JoinUpdate):
            way = operator.ways[-1]
            if operator.is_dot:
                way = operator.ways[0 if is_split else 2]
                pick(sources[1], "row" if is_split else "column")
                is_split = not is_split
            elif _is_embedding(expression) and sources[0] is largest:
                way = operator.ways[1]
                pick(sources[0], "row")
            elif operator.function != "attention":
                is_split = False
            elif is_split:
                way = operator.ways[0]
            placeholder = graph.group_of(expression, placeholder=True)
            forms = Way(tuple((a,) * len(graph.mesh) for a in way.axes), (way.output,) * len(graph.mesh))
            picks[placeholder] = list(graph.groups[placeholder].choices).index(forms)
        for bias in (s for s in sources if isinstance(s.operator, NewArray) and len(s.shape) == 1):
            pick(bias, "row" if is_split else "replicated")
        pick(expression, "column" if is_split else "replicated")
        split[id(expression)] = is_split
    return TilingPlan(graph, tuple(picks))


def _is_embedding(expression: Expression) -> bool:
    return isinstance(expression.operator, JoinUpdate) and expression.operator.function == "embedding"

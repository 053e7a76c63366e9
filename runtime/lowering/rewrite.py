"""Rewrites of a model's graph before planning. Each keeps the model's function, and changes which bytes can be swapped.

Rewrites depend on the model alone, never on the budget, so outputs are bit-equal at every budget.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cohabit.runtime.lowering.allowed_ops import is_assertion, is_random
from cohabit.runtime.lowering.fusion import CudnnKernels, OneDnnKernels, fuse
from cohabit.runtime.lowering.model import TABLE_OPS, FxModel
from cohabit.runtime.lowering.rewrites.attention import attend_in_parts, attend_plainly
from cohabit.runtime.lowering.rewrites.elementwise import drop_casts, use_gelu, use_rms_norm
from cohabit.runtime.lowering.rewrites.in_place import work_in_place
from cohabit.runtime.lowering.rewrites.precision import apply_options
from cohabit.runtime.lowering.rewrites.recurrent import pack_lstms, split_directions, split_recurrent_layers
from cohabit.runtime.lowering.rewrites.slicing import CONVOLUTIONS, split_large_layers, write_parts
from cohabit.runtime.lowering.rewrites.tables import join_tables
from cohabit.runtime.lowering.rewrites.transposed import convolve_transposed
from cohabit.runtime.options import Options

aten = torch.ops.aten

_FOLDED_BYTES = 1 << 20
"""Bytes of a weight that a batch norm is folded into at a time: float64 copies of whole weights would stay in the
heap."""
_CONSTANT_BYTES = 256 << 10
"""Maximum bytes that constant folding adds to the weights: masks and positions of a fixed length."""
HOST_TABLE_BYTES = 1 << 20
"""An embedding table at least this large stays in the host store, and its rows are read there."""

_PADDED_BY_WORD = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


_REQUIRED = frozenset({"inline_grad_regions", "drop_assertions", "apply_options", "drop_unused"})
"""Rewrites that a program needs to be served as its options say. Their errors are not caught."""


class RewriteFailed(Exception):
    """A rewrite met a program that it does not support."""

    def __init__(self, rewrite: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.rewrite = rewrite


def rewrite(
    model: FxModel, options: Options, symbols: Sequence[Mapping[str, int]], left_out: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Apply every rewrite except `left_out`, in an order in which each sees the results of earlier ones.

    `symbols` are the symbols' values in each planned shape; weights are packed for these shapes. Returns the names of
    the ops that each rewrite replaced; those that it gave other operands are not among them. Raises RewriteFailed.
    """
    applied: dict[str, tuple[str, ...]] = {}
    for step, *given in _steps(model, options, symbols):
        name = step.__name__
        if name in left_out:
            continue
        before = {node: node.target for node in model.graph.nodes if node.op == "call_function"}
        try:
            step(model, *given)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
            if name in _REQUIRED:
                raise
            raise RewriteFailed(name, error) from error
        kept = {node: node.target for node in model.graph.nodes}
        if name not in _REQUIRED:
            applied[name] = tuple(node.name for node, target in before.items() if kept.get(node) is not target)
    return applied


def _steps(
    model: FxModel, options: Options, symbols: Sequence[Mapping[str, int]]
) -> Iterator[tuple[Callable[..., None], *tuple[Any, ...]]]:
    """Yield the rewrites in their order, each with its arguments after the model."""
    yield from ((inline_grad_regions,), (drop_assertions,), (pad_by_numbers,))
    yield from ((fold_constants,), (fold_rows, symbols), (use_linear,), (fold_batch_norms,))
    yield (split_recurrent_layers,)
    if options.packed:
        if options.dtype == "float32":  # in a reduced type, casts to float32 keep precision
            yield (drop_casts,)
        yield from ((use_gelu,), (use_rms_norm,), (convolve_transposed,), (join_tables,))
        yield from ((attend_plainly,), (attend_in_parts,))
    yield (leave_tables_on_host,)
    yield split_large_layers, options.packed
    yield apply_options, options
    if options.packed:
        yield (pack_lstms,)
        yield fuse, OneDnnKernels(model.weights, symbols, measures=options.weights != "int8")
    elif options.fused:
        yield fuse, CudnnKernels()
    yield from ((split_directions,), (work_in_place,), (write_parts,), (drop_unused,))


def inline_grad_regions(model: FxModel) -> None:
    """Replace `with torch.no_grad()` regions by their bodies: inference records no gradients."""
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    while regions := [n for n in model.graph.nodes if n.op == "call_function" and n.target is wrap]:
        for node in regions:
            body = getattr(model.root, node.args[1].target)
            holes = [n for n in body.graph.nodes if n.op == "placeholder"]
            mapping = dict(zip(holes, node.args[2:], strict=True))
            with model.graph.inserting_before(node):
                for inner in body.graph.nodes:
                    if inner.op == "get_attr":
                        name = f"{node.name}_{inner.target}"
                        setattr(model.root, name, getattr(body, inner.target))
                        mapping[inner] = model.graph.get_attr(name)
                results = model.graph.graph_copy(body.graph, mapping)
            assert isinstance(results, tuple | list)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                model.graph.erase_node(user)
            model.graph.erase_node(node)


def drop_assertions(model: FxModel) -> None:
    """Remove export's run-time assertions: the server checks shapes and types before the model sees them."""
    for node in reversed(list(model.graph.nodes)):
        if node.op == "call_function" and is_assertion(node.target) and not node.users:
            model.graph.erase_node(node)


def pad_by_numbers(model: FxModel) -> None:
    """Replace the padding `valid` or `same` of convolutions by numbers, where both sides get the same."""
    for node in model.graph.nodes:
        new = _PADDED_BY_WORD.get(node.target) if node.op == "call_function" else None
        weight = None if new is None else model.weight_of(node.args[1])
        if weight is None or node.kwargs:
            continue
        defaults: tuple[Any, ...] = (None, [1], "valid", [1], 1)
        given: list[Any] = [*node.args, *defaults[len(node.args) - 2 :]]
        dilation = list(given[5]) * (weight.dim() - 2 if len(given[5]) == 1 else 1)
        kernel = weight.shape[2:] if given[4] == "same" else (1,) * len(dilation)
        total = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        if all(n % 2 == 0 for n in total):
            given[4] = [n // 2 for n in total]
            node.target, node.args = new, tuple(given)


def fold_constants(model: FxModel) -> None:
    """Compute values that depend on weights alone only once, such as a weight norm, unless that adds bytes.

    A value without operands, such as a causal mask, is also computed once if it is small. So is a value that depends on
    such values and weights, such as the angles of a rotary embedding.
    """
    # Find the nodes that depend on weights or on nothing, with the weights that each depends on.
    made_of_nothing: set[fx.Node] = set()
    depends: dict[fx.Node, set[fx.Node]] = {}
    for node in model.graph.nodes:
        if model.weight_of(node) is not None:
            depends[node] = {node}
        elif _is_pure(node) and all(n in depends for n in node.all_input_nodes):
            if not node.all_input_nodes and not _makes_constant(node):
                continue
            depends[node] = set().union(*(depends[n] for n in node.all_input_nodes))
            if not node.all_input_nodes or not made_of_nothing.isdisjoint(node.all_input_nodes):
                made_of_nothing.add(node)
    # Group results that share weights: weights are saved only if all of their readers are folded.
    groups: list[tuple[set[fx.Node], list[fx.Node]]] = []
    for node, weights in depends.items():
        if node.op == "call_function" and any(user not in depends for user in node.users):
            shared = [group for group in groups if group[0] & weights]
            groups = [group for group in groups if group not in shared]
            groups.append((weights.union(*(g[0] for g in shared)), [n for g in shared for n in g[1]] + [node]))
    for weights, results in groups:
        given = sum(model.weights[w.name].nbytes for w in weights if all(user in depends for user in w.users))
        made = [v.nbytes for n in results if isinstance(v := n.meta.get("val"), torch.Tensor)]
        constant = sum(made) <= _CONSTANT_BYTES and made_of_nothing.issuperset(results)
        if len(made) == len(results) and (sum(made) <= given or constant):
            for node in results:
                value = model.in_file(_value(model, node).contiguous())
                node.replace_all_uses_with(model.add_weight(f"{node.name}_value", value))


def _is_pure(node: fx.Node) -> bool:
    """Whether a node returns the same result in every call."""
    target: Any = node.target
    if target is operator.getitem:
        return True
    known = node.op == "call_function" and isinstance(target, torch._ops.OpOverload)
    return known and not is_random(target)


def _makes_constant(node: fx.Node) -> bool:
    """Whether an op without operands creates the same tensor on the CPU in every call."""
    device = node.kwargs.get("device")
    on_cpu = device is None or torch.device(str(device)).type == "cpu"
    made = isinstance(node.meta.get("val"), torch.Tensor) and "empty" not in str(node.target)
    return on_cpu and made


def _value(model: FxModel, node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
    """Return the result of a node that depends only on weights and on nodes with known values."""
    known = {} if known is None else known
    if (weight := model.weight_of(node)) is not None:
        return weight
    if node not in known:
        target: Any = node.target
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _value(model, n, known))
        with torch.no_grad():
            known[node] = target(*args, **kwargs)
    return known[node]


def fold_rows(model: FxModel, symbols: Sequence[Mapping[str, int]]) -> None:
    """Compute values that depend only on the batch size once, such as a causal mask, if all their rows are equal."""
    if model.batch_symbol is None:
        return
    # Find the values that depend on nothing but the batch size.
    sizes = sorted({values[model.batch_symbol] for values in symbols})
    batch: set[fx.Node] = set()
    known: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node.target is aten.sym_size.int and str(node.meta.get("val")) == model.batch_symbol:
            batch.add(node)
        elif model.weight_of(node) is None and not (
            _is_pure(node)
            and all(n in known or n in batch for n in node.all_input_nodes)
            and (node.all_input_nodes or _makes_constant(node))
        ):
            continue
        elif not batch.isdisjoint(node.all_input_nodes):
            batch.add(node)
        known.add(node)
    # Replace those that other nodes read by one row, expanded to the batch.
    for node in sorted(batch):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or known.issuperset(node.users):
            continue
        row_shape = value.shape[1:]
        small = (
            all(isinstance(n, int) for n in row_shape) and math.prod(row_shape) * value.itemsize <= _CONSTANT_BYTES
        )
        if not small or any(user.op == "output" for user in node.users):
            continue
        values = [_value(model, node, {n: size for n in batch if n.target is aten.sym_size.int}) for size in sizes]
        row = values[0][:1].clone()
        if all(len(v) == size and torch.equal(v, row.expand_as(v)) for v, size in zip(values, sizes, strict=True)):
            rows = next(n for n in batch if n.target is aten.sym_size.int)
            with model.graph.inserting_before(node):
                constant = model.add_weight(f"{node.name}_row", row)
                whole = model.graph.call_function(aten.expand.default, (constant, [rows, *row_shape]))
            whole.meta = dict(node.meta)
            node.replace_all_uses_with(whole)
    model.graph.eliminate_dead_code()


def use_linear(model: FxModel) -> None:
    """Replace products of a matrix and a weight by linear layers, whose weights can be split and packed."""
    turned: dict[fx.Node, fx.Node] = {}
    for node in list(model.graph.nodes):
        if node.op != "call_function" or node.kwargs or node.target not in (aten.addmm.default, aten.mm.default):
            continue
        *bias, x, weight_node = node.args
        weight = model.weight_of(weight_node)
        if weight is None or any((b := model.weight_of(n)) is None or b.shape != weight.shape[1:] for n in bias):
            continue
        if weight_node not in turned:
            value = model.in_file(weight.t().contiguous())
            turned[weight_node] = model.add_weight(f"{weight_node.name}_turned", value)
        node.target, node.args = aten.linear.default, (x, turned[weight_node], *bias)


def fold_batch_norms(model: FxModel) -> None:
    """Fold inference-mode batch norms into the convolutions before them, in float64."""
    for norm in list(model.graph.nodes):
        if norm.op != "call_function" or norm.target is not aten.batch_norm.default or norm.args[5]:
            continue
        conv = norm.args[0]
        if conv.target not in CONVOLUTIONS or len(conv.users) != 1:
            continue
        weight = model.weight_of(conv.args[1])
        if weight is None or norm.meta["val"].dim() != weight.dim():
            continue  # an image without a batch: the norm treats its rows as channels
        statistics = [model.weight_of(a) for a in norm.args[1:5]]
        bias = model.weight_of(conv.args[2]) if len(conv.args) > 2 else None
        if any(s is None for s in statistics[2:]):
            continue
        if any(a is not None and s is None for a, s in zip(norm.args[1:3], statistics[:2], strict=True)):
            continue
        if len(conv.args) > 2 and conv.args[2] is not None and bias is None:
            continue
        folded, shift = _fold(weight, bias, statistics, norm.args[7])
        name = conv.args[1].name
        new_weight, new_bias = (
            model.add_weight(f"{name}_folded", model.in_file(folded)),
            model.add_weight(f"{name}_shift", shift),
        )
        conv.args = (conv.args[0], new_weight, new_bias, *conv.args[3:])
        norm.replace_all_uses_with(conv)
        model.graph.erase_node(norm)


def _fold(
    weight: torch.Tensor, bias: torch.Tensor | None, statistics: Sequence[torch.Tensor | None], eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and bias of a convolution that includes the norm. Statistics: scale, shift, mean, variance."""
    gamma, beta, mean, variance = statistics
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance.double() + eps) * (1.0 if gamma is None else gamma.double())
    shift = ((0.0 if bias is None else bias.double()) - mean.double()) * scale
    if beta is not None:
        shift = shift + beta.double()
    scale, folded = scale.reshape(-1, *[1] * (weight.dim() - 1)), torch.empty_like(weight)
    rows = max(1, _FOLDED_BYTES * weight.shape[0] // max(1, weight.nbytes))
    for part, own, factors in zip(*(torch.split(t, rows) for t in (folded, weight, scale)), strict=True):
        part.copy_(own.double() * factors)
    return folded, shift.to(weight.dtype)


def leave_tables_on_host(model: FxModel) -> None:
    """Leave large embedding tables in the host store: an inference needs only a few of their rows.

    The first argument of their ops becomes the table's name, which binding replaces by the table.
    """
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target in TABLE_OPS:
            table = model.weight_of(node.args[0])
            if table is not None and table.nbytes >= HOST_TABLE_BYTES:
                name = node.args[0].name
                model.tables[name] = table
                node.args = (name, *node.args[1:])


def drop_unused(model: FxModel) -> None:
    """Remove ops and weights that are no longer used."""
    model.graph.eliminate_dead_code()
    for node in list(model.graph.nodes):
        model.drop_unused_weight(node)

"""Rules: the layouts of an operator's results, given those of its operands.

A rule covers all overloads of an operator. It looks at sizes and layouts only, and raises `Mixing` unless every element
of the result depends on a single row. It may assume that a result has the shape that its layout says (`checked`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cohabit.runtime.lowering.rows.layouts import (
    BATCH,
    CONSTANT,
    Constant,
    Layout,
    Mixed,
    Mixing,
    NoRule,
    Ordinal,
    Repeated,
    RowNumber,
    Rows,
    Value,
    apart,
    broadcast,
    joined,
    moved,
    reshaped,
)


@dataclass(frozen=True)
class OpCall:
    """A call of an operator. Operands are `Value`s, sizes are those at `BATCH`."""

    op: OpOverload
    arguments: Mapping[str, Any]
    """By the schema's names, with defaults."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the results."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        found = self.arguments.get(name)
        return default if found is None else found

    @cached_property
    def operands(self) -> list[Value]:
        return [leaf for leaf in pytree.tree_leaves(list(self.arguments.values())) if isinstance(leaf, Value)]

    @property
    def first(self) -> Value:
        return self.operands[0]

    @property
    def rest(self) -> list[Value]:
        return self.operands[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    def dim(self, name: str = "dim", default: int = 0) -> int:
        """Return a dimension of the first operand."""
        return int(self.get(name, default)) % max(1, self.first.rank)

    def dims(self, name: str = "dim") -> list[int]:
        """Return dimensions of the first operand; all if the call names none."""
        given = self.arguments.get(name)
        if given is None or given == []:
            return list(range(self.first.rank))
        return [dim % max(1, self.first.rank) for dim in ([given] if isinstance(given, int) else given)]


Rule = Callable[[OpCall], Layout | list[Layout]]
"""Returns the layout of every result, or one for all. Raises Mixing."""

SIZE_ARGUMENTS: dict[str, frozenset[str]] = {
    op: frozenset(names.split())
    for ops, names in (
        ("view reshape _unsafe_view expand broadcast_to _reshape_copy view_copy expand_copy", "size shape"),
        ("full zeros ones empty new_full new_zeros new_ones new_empty", "size"),
        ("slice slice_scatter arange", "start end step"),
        ("narrow", "start length"),
        ("split split_with_sizes split_copy split_with_sizes_copy", "split_size split_sizes"),
        ("repeat tile", "repeats dims"),
        ("unflatten", "sizes"),
        ("repeat_interleave", "output_size"),
        ("convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", "groups"),
        ("affine_grid_generator", "size"),
    )
    for op in ops.split()
}
"""Arguments that may depend on the batch size. Elsewhere, a number of the batch counts as mixing."""

RULES: dict[str, Rule] = {}
R = TypeVar("R", bound=Rule)


def _rule(names: str) -> Callable[[R], R]:
    def register(rule: R) -> R:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def rule_of(op: OpOverload) -> Rule | None:
    found = RULES.get(op._schema.name.split("::")[1])
    return elementwise if found is None and torch.Tag.pointwise in op.tags else found


def constants_only(operands: Sequence[Value]) -> None:
    """Raise Mixing unless operands depend on no row: weights, statistics, offsets."""
    if any(not isinstance(value.rows, Constant) for value in operands):
        raise NoRule("an operand depends on rows that is a weight elsewhere")


# --------------------------------------------------------------------------------------------------
# element by element


@_rule(
    "hardswish masked_fill clamp_max clamp_min type_as nan_to_num isclose conj resolve_conj resolve_neg"
    " real imag positive isfinite isinf isnan isposinf isneginf square gelu silu mish relu relu6 selu celu leaky_relu"
    " hardsigmoid hardtanh softplus softshrink hardshrink tanhshrink threshold logit log_sigmoid softsign rsub"
    " floor_divide true_divide float_power where __and__ __or__ __xor__ dropout feature_dropout"
    " polar complex _prelu_kernel rrelu native_dropout _cast_Float _cast_Long isreal"
)
def elementwise(call: OpCall) -> Layout:
    if call.op._overloadname == "default" and call.op._schema.name == "aten::where":
        raise NoRule("it returns as many elements as values decide")
    return broadcast(call.operands, len(call.shape))


@_rule("copy fill zero")
def overwritten(call: OpCall) -> Layout:
    layout = broadcast(call.rest, len(call.shape))
    return filled(call) if isinstance(layout, Constant) else layout


@_rule("alias detach contiguous clone lift lift_fresh lift_fresh_copy _to_copy to")
def same(call: OpCall) -> Layout:
    if len(call.operands) > 1:
        return call.operands[0].layout if isinstance(call.operands[1].rows, Constant) else elementwise(call)
    return call.first.layout


@_rule("mul")
def multiplied(call: OpCall) -> Layout:
    layout, by = call.first.unmixed, call["other"]
    if isinstance(layout, RowNumber) and isinstance(by, int):
        return replace(layout, step=layout.step * by)
    return elementwise(call)


@_rule("zeros_like ones_like full_like full zeros ones new_zeros new_ones new_full")
def filled(call: OpCall) -> Layout:
    found = [dim for dim, size in enumerate(call.shape) if size and size % BATCH == 0]
    if len(found) > 1:
        raise Mixing("the batch is in two dimensions")
    return Repeated(found[0]) if found else CONSTANT


@_rule("arange")
def counted(call: OpCall) -> Layout:
    (size,) = call.shape
    start, step = call.get("start", 0), call.get("step", 1)
    if start != 0 or not isinstance(step, int):
        raise Mixing("it counts rows")
    if size == BATCH and step % BATCH:
        return RowNumber(0, step=step)
    if size % BATCH == 0 and 0 < step < BATCH:
        return Ordinal(0, step)
    raise Mixing("it counts rows")


# --------------------------------------------------------------------------------------------------
# shapes


@_rule(
    "view reshape _unsafe_view flatten unflatten unsqueeze squeeze view_copy reshape_as view_as _reshape_copy"
    " squeeze_copy unsqueeze_copy _reshape_alias ravel"
)
def reshape(call: OpCall) -> Layout:
    return reshaped(call.first.layout, call.first.shape, call.shape)


@_rule(
    "permute transpose swapaxes swapdims t numpy_T mT mH matrix_H adjoint movedim moveaxis permute_copy transpose_copy"
)
def permuted(call: OpCall) -> Layout:
    layout = call.first.unmixed
    if isinstance(layout, Constant):
        return layout
    # Permute a tensor with a different size in each dimension.
    numbered = torch.empty(tuple(range(2, 2 + call.first.rank)), device="meta")
    arguments = [v for name, v in call.arguments.items() if name != "self" and not isinstance(v, Value)]
    order = [size - 2 for size in call.op(numbered, *arguments).shape]
    return replace(layout, dim=order.index(layout.dim))


@_rule("expand expand_as broadcast_to expand_copy")
def expanded(call: OpCall) -> Layout:
    layout = call.first.unmixed
    if isinstance(layout, Constant):
        return filled(call)
    return replace(layout, dim=layout.dim + len(call.shape) - call.first.rank)


@_rule("repeat tile")
def repeated(call: OpCall) -> Layout:
    layout, times = call.first.unmixed, list(call.get("repeats", call.get("dims")))
    own = (*[1] * (len(times) - call.first.rank), *call.first.shape)
    times = [*[1] * (len(own) - len(times)), *times]
    found = [dim for dim, number in enumerate(times) if number % BATCH == 0]
    if isinstance(layout, Constant) and found:
        if len(found) > 1:
            raise Mixing("the batch is in two dimensions")
        (dim,) = found
        return Repeated(dim) if own[dim] == 1 else Rows(dim, times[dim] // BATCH, own[dim])
    if isinstance(layout, Constant):
        return layout
    if found:
        raise Mixing("it repeats rows by the batch size")
    dim = layout.dim + len(own) - call.first.rank
    if isinstance(layout, Ordinal) and times[dim] != 1:
        raise Mixing("it repeats places in the batch")
    if isinstance(layout, Rows | RowNumber):
        return replace(layout, dim=dim, outer=layout.outer * times[dim])
    return replace(layout, dim=dim)


@_rule("repeat_interleave")
def interleaved(call: OpCall) -> Layout:
    layout, times = call.first.unmixed, call["repeats"]
    flattened = call["dim"] is None and call.first.rank != 1
    if not isinstance(times, int) or flattened or isinstance(layout, Ordinal):
        raise NoRule("it repeats elements as values or places say")
    if isinstance(layout, Rows | RowNumber) and layout.dim == call.dim():
        return replace(layout, inner=layout.inner * times)
    return layout


@_rule("cat concat concatenate")
def concatenated(call: OpCall) -> Layout:
    values = [value for value in call.operands if value.shape != (0,)]
    dim = call.get("dim", 0) % len(call.shape)
    kept = [value.rows for value in values]
    if not any(isinstance(layout, Rows | Repeated) and layout.dim == dim for layout in kept):
        return joined(kept)
    if not all(isinstance(layout, Rows) and layout.dim == dim for layout in kept):
        raise Mixing("it joins other values to the batch")
    rows = [layout for layout in kept if isinstance(layout, Rows)]
    if len({layout.inner for layout in rows}) > 1:
        raise Mixing("it joins rows of other sizes")
    return Rows(dim, sum(layout.outer for layout in rows), rows[0].inner)


@_rule("stack _stack")
def stacked(call: OpCall) -> Layout:
    layout, dim = joined(value.rows for value in call.operands), call.get("dim", 0) % len(call.shape)
    return layout if isinstance(layout, Constant) else moved(layout, layout.dim + (dim <= layout.dim))


def _part(value: Value, dim: int, start: int, size: int) -> Layout:
    """Return the layout of consecutive elements along a dimension."""
    layout = value.unmixed
    if isinstance(layout, Constant) or layout.dim != dim or size == value.shape[dim]:
        return layout
    if isinstance(layout, Repeated):
        return layout if size % BATCH == 0 else CONSTANT
    if isinstance(layout, Rows) and start % (BATCH * layout.inner) == 0 and size % (BATCH * layout.inner) == 0:
        return replace(layout, outer=size // (BATCH * layout.inner))
    raise Mixing("it takes part of the batch")


@_rule("slice narrow")
def sliced(call: OpCall) -> Layout:
    value, dim, step = call.first, call.dim(), call.get("step", 1)
    layout, start = value.unmixed, call.get("start", 0)
    start += value.shape[dim] if start < 0 else 0
    if step == 1:
        return _part(value, dim, start, call.shape[dim])
    if isinstance(layout, Constant) or layout.dim != dim:
        return layout
    one_each = isinstance(layout, Rows) and layout.outer == 1 and step == layout.inner and 0 <= start < step
    if one_each and call.shape[dim] == BATCH:
        return Rows(dim)
    raise Mixing("it takes part of the batch")


@_rule("split split_with_sizes chunk tensor_split split_copy split_with_sizes_copy unsafe_split unsafe_chunk")
def parts(call: OpCall) -> list[Layout]:
    dim, start, found = call.dim(), 0, list[Layout]()
    for shape in call.shapes:
        found.append(_part(call.first, dim, start, shape[dim]))
        start += shape[dim]
    return found


@_rule("select unbind select_copy unbind_copy")
def selected(call: OpCall) -> Layout:
    layout, dim = call.first.unmixed, call.dim()
    if isinstance(layout, Constant):
        return layout
    if layout.dim == dim:
        if isinstance(layout, Repeated):
            return CONSTANT
        raise Mixing("it takes single rows")
    return replace(layout, dim=layout.dim - (dim < layout.dim))


# --------------------------------------------------------------------------------------------------
# along dimensions


def _along(
    dims_of: Callable[[OpCall], Sequence[int]], removed: Callable[[OpCall], bool] = lambda call: False
) -> Callable[[OpCall], Layout]:
    """Return the rule of operators that compute along some dimensions, which they may remove; others are batches."""

    def rule(call: OpCall) -> Layout:
        dims = set(dims_of(call))
        if len({value.rank for value in call.operands}) > 1:
            raise NoRule("its operands have different ranks")
        layout = joined(apart(value, dims, "it computes along rows") for value in call.operands)
        if isinstance(layout, Constant) or not removed(call):
            return layout
        return moved(layout, layout.dim - sum(dim < layout.dim for dim in dims))

    return rule


_rule("flip roll")(_along(lambda call: call.dims("dims")))
_rule("unfold")(_along(lambda call: [call["dimension"]]))
_rule("diagonal diagonal_copy")(_along(lambda call: [call.dim("dim1"), call.dim("dim2", 1)], lambda call: True))
_rule("cosine_similarity")(_along(lambda call: [call.dim()], lambda call: True))
_rule(
    "softmax log_softmax _softmax _log_softmax _safe_softmax softmin cumsum cumprod cummax cummin logcumsumexp sort"
    " topk argsort glu diff linalg_cross _fft_r2c _fft_c2r _fft_c2c fft_fft fft_ifft fft_rfft fft_irfft fft_hfft"
    " fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn"
)(_along(OpCall.dims))
_reduced = _along(OpCall.dims, lambda call: not call.get("keepdim", False))


@_rule(
    "sum mean amax amin prod std var std_mean var_mean logsumexp nansum nanmean any all argmax argmin median nanmedian"
    " norm linalg_vector_norm max min aminmax count_nonzero mode kthvalue"
)
def reduced(call: OpCall) -> Layout:
    return elementwise(call) if "other" in call.arguments else _reduced(call)


def _last(count: int) -> Callable[[OpCall], Layout]:
    """Return the rule of operators that compute along the last `count` dimensions; all others are batches."""

    def rule(call: OpCall) -> Layout:
        constants_only(call.rest)
        return apart(call.first, range(call.first.rank - count, call.first.rank), "it computes along rows")

    return rule


for _n in (1, 2, 3):
    _pools = " ".join(
        f"{kind}_pool{_n}d{more}"
        for kind in ("avg", "max", "adaptive_avg", "adaptive_max", "_adaptive_avg", "lp")
        for more in ("", "_with_indices")
    )
    _pads = f"reflection_pad{_n}d replication_pad{_n}d"
    _rule(f"{_pools} {_pads} upsample_nearest{_n}d _upsample_nearest_exact{_n}d")(_last(_n))
_rule("upsample_linear1d view_as_complex")(_last(1))
_rule("upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa tril triu")(_last(2))
_rule("linalg_inv_ex linalg_cholesky_ex linalg_det _linalg_det linalg_eigh _linalg_eigh")(_last(2))
_rule("upsample_trilinear3d pixel_shuffle pixel_unshuffle")(_last(3))


@_rule("view_as_real")
def as_pairs(call: OpCall) -> Layout:
    return call.first.rows


@_rule("one_hot")
def one_hot(call: OpCall) -> Layout:
    if call["num_classes"] < 0:
        raise Mixing("the number of classes depends on rows")
    return call.first.rows


@_rule("bucketize")
def bucketed(call: OpCall) -> Layout:
    constants_only([call["boundaries"]])
    return call.first.rows


@_rule("searchsorted")
def searched(call: OpCall) -> Layout:
    ordered, values = call["sorted_sequence"], call["self"]
    constants_only([sorter] if (sorter := call.get("sorter")) is not None else [])
    if not isinstance(values, Value):
        raise NoRule("it looks up a number")
    if isinstance(ordered.rows, Constant) and ordered.rank == 1:
        return values.rows
    dims = [ordered.rank - 1]
    return joined([apart(ordered, dims, "it searches rows"), apart(values, dims, "it searches rows")])


@_rule("pad constant_pad_nd _pad_circular _pad_enum")
def padded(call: OpCall) -> Layout:
    amounts, layout = list(call["pad"]), call.first.rows
    if not isinstance(layout, Constant):
        place = 2 * (call.first.rank - 1 - layout.dim)
        if any(amounts[place : place + 2]):
            raise Mixing("it pads the batch")
    return layout


# --------------------------------------------------------------------------------------------------
# products


def _product(operands: Sequence[tuple[Value, Sequence[Any]]], result: Sequence[Any]) -> Constant | Rows | Repeated:
    """Return the layout of an Einstein sum, given a label per dimension of the operands and the result."""
    found = []
    for value, labels in operands:
        layout = value.rows
        if not isinstance(layout, Constant):
            if labels[layout.dim] not in result:
                raise Mixing("it sums over rows")
            layout = moved(layout, list(result).index(labels[layout.dim]))
        found.append(layout)
    return joined(found)


def _biased(call: OpCall, product: Constant | Rows | Repeated, bias: Value | None) -> Layout:
    return product if bias is None else joined([product, broadcast([bias], len(call.shape))])


def _leading(value: Value, count: int) -> list[int]:
    """Return labels for all but the last `count` dimensions, which are broadcast: their distance from these."""
    return list(range(value.rank - count, 0, -1))


@_rule("matmul mm bmm mv dot vdot addmm baddbmm addmv linear")
def matrix_product(call: OpCall) -> Layout:
    values = call.operands
    name = call.op._schema.name.split("::")[1]
    bias = values.pop(0) if name in ("addmm", "baddbmm", "addmv") else values.pop() if len(values) > 2 else None
    x, y = values
    by_row = name == "linear"
    left = [*_leading(x, 2), "m", "k"][-x.rank :] if x.rank > 1 else ["k"]
    right = [*_leading(y, 2), *("nk" if by_row else "kn")] if y.rank > 1 else ["k"]
    if by_row:
        left = [*_leading(x, 1), "k"]
        right = ["n", "k"][-y.rank :] if y.rank > 1 else ["k"]
        result = [*_leading(x, 1), *(["n"] if y.rank > 1 else [])]
    else:
        lead = max(_leading(x, 2), _leading(y, 2), key=len)
        result = [*lead, *(["m"] if x.rank > 1 else []), *(["n"] if y.rank > 1 else [])]
    return _biased(call, _product([(x, left), (y, right)], result), bias)


@_rule("bilinear")
def bilinear(call: OpCall) -> Layout:
    x, y, *constants = call.operands
    constants_only(constants)
    return joined([apart(x, [-1], "it sums over rows"), apart(y, [-1], "it sums over rows")])


@_rule("cdist _cdist_forward")
def distances(call: OpCall) -> Layout:
    x, y = call.operands
    lead = max(_leading(x, 2), _leading(y, 2), key=len)
    return _product([(x, [*_leading(x, 2), "m", "k"]), (y, [*_leading(y, 2), "n", "k"])], [*lead, "m", "n"])


@_rule("einsum")
def einstein_sum(call: OpCall) -> Layout:
    given, arrow, result = str(call["equation"]).replace(" ", "").partition("->")
    terms = given.split(",")
    operands = [(value, _labels(term, value.rank)) for value, term in zip(call.operands, terms, strict=True)]
    named = [label for _, labels in operands for label in labels]
    if not arrow:
        spread = sorted({label for label in named if isinstance(label, int)}, reverse=True)
        result_labels = [*spread, *sorted(n for n in set(named) if isinstance(n, str) and named.count(n) == 1)]
    else:
        result_labels = _labels(result, len(call.shape))
    return _product(operands, result_labels)


def _labels(term: str, rank: int) -> list[Any]:
    """Return a label for each dimension. Those of an ellipsis are numbers, counted from its end."""
    before, dots, after = term.partition("...")
    count = rank - len(before) - len(after)
    return [*before, *(range(count, 0, -1) if dots else ()), *after]


@_rule(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math"
)
def attention(call: OpCall) -> Layout:
    query, key, value = (call[name] for name in ("query", "key", "value"))
    rank = len(call.shape)
    operands = [(query, [*_leading(query, 2), "l", "e"]), (key, [*_leading(key, 2), "s", "e"])]
    operands.append((value, [*_leading(value, 2), "s", "v"]))
    if (mask := call.get("attn_mask")) is not None:
        operands.append((mask, [*_leading(mask, 2), "l", "s"][-mask.rank :]))
    layout = _product(operands, [*range(rank - 2, 0, -1), "l", "v"])
    together = [rank - 2] * call.get("is_causal", False) + [rank - 3] * call.get("enable_gqa", False)
    if not isinstance(layout, Constant) and layout.dim in together:
        raise Mixing("a row attends by its place")
    return layout


# --------------------------------------------------------------------------------------------------
# layers


def _none(value: Value) -> Constant:
    if not isinstance(value.rows, Constant):
        raise NoRule("the operand has no dimension for a batch")
    return CONSTANT


def _samples(value: Value, least_rank: int, dim: int = 0) -> Constant | Rows | Repeated:
    """Return the layout of an operand with independent samples along one dimension, of a rank that has it."""
    layout = value.rows
    if not isinstance(layout, Constant) and (value.rank < least_rank or layout.dim != dim):
        raise Mixing("it computes along rows")
    return layout


@_rule(
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d"
    " _convolution_mode"
)
def convolved(call: OpCall) -> Layout:
    x, weight = call["input"], call["weight"]
    rank = weight.rank
    filters = weight.rows
    if isinstance(filters, Rows):  # filters of each row, as groups of channels
        image, groups = x.rows, call["groups"]
        one_each = image == Rows(1, 1, x.shape[1] // BATCH) and x.rank == rank
        if one_each and (filters.dim, filters.outer) == (0, 1) and not call.get("bias") and groups % BATCH == 0:
            return Rows(1, 1, call.shape[1] // BATCH)
    constants_only(call.rest)
    if call["groups"] % BATCH == 0:
        raise Mixing("the number of groups is that of rows")
    return _samples(x, rank)


@_rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def layer_norm(call: OpCall) -> Layout:
    return _last(len(call["normalized_shape"]))(call)


def _per_sample(least_rank: int) -> Callable[[OpCall], Layout]:
    """Return the rule of operators that compute each sample along the first dimension by itself."""
    return lambda call: joined(_samples(value, least_rank) for value in call.operands)


_grouped = _rule("group_norm native_group_norm local_response_norm channel_shuffle stft")(_per_sample(2))
_rule("col2im istft grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator")(_per_sample(3))
_rule("im2col")(_per_sample(4))


@_rule("instance_norm")
def instance_norm(call: OpCall) -> Layout:
    if call.get("running_mean") is not None and call["use_input_stats"]:
        raise Mixing("it changes its statistics")
    return _grouped(call)


@_rule("batch_norm native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit")
def batch_norm(call: OpCall) -> list[Layout]:
    if call.get("training", False) or call.get("running_mean") is None:
        raise Mixing("it takes the statistics of all rows")
    constants_only(call.rest)
    layout = apart(call.first, [1], "rows are its channels")
    statistics: list[Layout] = [CONSTANT] * (len(call.shapes) - 1)
    return [layout, *statistics]


@_rule("lstm gru rnn_tanh rnn_relu")
def recurrent(call: OpCall) -> list[Layout]:
    if "data" in call.arguments:
        raise NoRule("it reads packed sequences")
    states = pytree.tree_leaves(call["hx"])
    constants_only(pytree.tree_leaves(call["params"]))
    x = call["input"]
    dim = 0 if call["batch_first"] else 1
    layouts = [(x, _samples(x, 3, dim)), *((state, _samples(state, 3, 1)) for state in states)]
    layout = joined(moved(own, 0) if not isinstance(own, Constant) else own for _, own in layouts)
    if isinstance(layout, Constant):
        return [layout] * len(call.shapes)
    return [moved(layout, dim), *[moved(layout, 1)] * (len(call.shapes) - 1)]


@_rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def recurrent_cell(call: OpCall) -> Layout:
    given = [call["input"], *pytree.tree_leaves(call["hx"])]
    constants_only([value for value in call.operands if all(value is not own for own in given)])
    return joined(_samples(value, 2) for value in given)


# --------------------------------------------------------------------------------------------------
# look-ups


@_rule("embedding")
def embedded(call: OpCall) -> Layout:
    constants_only([call["weight"]])
    return call["indices"].rows  # type: ignore[no-any-return]


@_rule("embedding_bag _embedding_bag _embedding_bag_forward_only")
def bags(call: OpCall) -> list[Layout]:
    indices, offsets, weights = call["indices"], call["offsets"], call.get("per_sample_weights")
    constants_only([call["weight"]])
    layout = joined([indices.rows, *([] if weights is None else [weights.rows])])
    if indices.rank == 2 and not isinstance(layout, Constant) and layout.dim == 1:
        raise Mixing("it sums over rows")
    if indices.rank == 1 and not isinstance(layout, Constant):
        # Offsets begin one or several bags of equal size per row.
        size, count = indices.shape[0] // BATCH, offsets.shape[0] // BATCH
        at = RowNumber(0, step=size) if count == 1 else Ordinal(0, size // max(1, count))
        if (
            layout != Rows(0, 1, size)
            or offsets.layout != at
            or size % max(1, count)
            or call["include_last_offset"]
        ):
            raise NoRule("its bags are not as many for each row")
        layout = Rows(0, 1, count)
    return [layout, *[Mixed("inner results of bags")] * (len(call.shapes) - 1)]


@_rule("index_select")
def selected_rows(call: OpCall) -> Layout:
    return _indexed(call.first, [None] * call.dim() + [call["index"]])


@_rule("gather")
def gathered(call: OpCall) -> Layout:
    value, index, dims = call.first, call["index"], [call.dim()]
    layout = apart(value, dims, "it picks elements of other rows")
    if isinstance(layout, Constant):
        return index.rows  # type: ignore[no-any-return]
    return joined([layout, apart(index, dims, "it picks elements of other rows")])


@_rule("scatter scatter_add scatter_reduce")
def scattered(call: OpCall) -> Layout:
    layouts = [apart(value, [call.dim()], "it writes to other rows") for value in call.operands if value.rank]
    layout = joined(layouts)
    if not isinstance(layout, Constant) and any(
        value.rank != call.first.rank or value.shape[layout.dim] != call.first.shape[layout.dim]
        for value in call.operands
        if value.rank
    ):
        raise Mixing("it writes to some rows only")
    return layout


@_rule("index _unsafe_index")
def indexed(call: OpCall) -> Layout:
    return _indexed(call.first, call["indices"])


def _indexed(value: Value, indices: Sequence[Value | None]) -> Layout:
    """Return the layout of `value[indices]`: a row's own elements, if a row's place is its index."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        raise NoRule("it picks as many elements as values decide")
    rank = max(index.rank for _, index in given)
    layout = value.rows if not isinstance(value.layout, RowNumber | Ordinal) else _none(value)
    picked = False
    found: list[Rows | Repeated] = []
    for dim, index in given:
        shift = rank - index.rank
        if not isinstance(layout, Constant) and layout.dim == dim:
            # A dimension with the rows is indexed: by the rows' places only.
            own = _own_rows(layout, index, value.shape[dim])
            picked = True
            found.append(replace(own, dim=own.dim + shift))
        elif not isinstance(own_rows := index.rows, Constant):
            found.append(replace(own_rows, dim=own_rows.dim + shift))
    if not isinstance(layout, Constant) and not picked and found:
        raise Mixing("it picks elements of other rows")
    dims = [dim for dim, _ in given]
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    if found:
        together = joined(found)
        return together if isinstance(together, Constant) else replace(together, dim=together.dim + start)
    if isinstance(layout, Constant):
        return layout
    before = sum(dim not in dims for dim in range(layout.dim))
    return replace(layout, dim=before + (rank if before >= start else 0))


def _own_rows(layout: Rows | Repeated, index: Value, size: int) -> Rows:
    """Return the layout, in an index's dimensions, of the elements that it picks from the rows' dimension of `size`."""
    at = index.layout
    if isinstance(at, RowNumber) and at.step == 1 and size == BATCH:
        return Rows(at.dim, at.outer, at.inner)
    if isinstance(at, Ordinal) and at.step == 1 and index.shape[at.dim] == size and isinstance(layout, Rows):
        return Rows(at.dim, layout.outer, layout.inner)
    raise Mixing("it picks other rows")


@_rule("index_put _unsafe_index_put")
def put(call: OpCall) -> Layout:
    value, indices, values = call.first, call["indices"], call["values"]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype is torch.bool and prod(values.shape) == 1:
        (dim, mask), own = given[0], value.rows  # a mask selects elements to fill
        constants_only([values])
        layout = mask.rows
        return joined([own, layout if isinstance(layout, Constant) else moved(layout, layout.dim + dim)])
    where = _indexed(value, indices)
    layout = value.rows
    if isinstance(layout, Constant):
        constants_only([values, *(index for _, index in given)])
        return layout
    dims = [dim for dim, _ in given]
    picked = value.rank - len(dims) + max(index.rank for _, index in given)
    joined([where, broadcast([values], picked)])  # type: ignore[list-item]
    return layout


@_rule("slice_scatter")
def slice_written(call: OpCall) -> Layout:
    value, source = call.first, call["src"]
    if value.shape != source.shape:
        dims = [call.dim()]
        return joined([apart(value, dims, "it writes to some rows"), apart(source, dims, "it writes to some rows")])
    return joined([value.rows, source.rows])


@_rule("select_scatter")
def select_written(call: OpCall) -> Layout:
    dim, source = call.dim(), call["src"].rows
    if not isinstance(source, Constant):
        source = moved(source, source.dim + (source.dim >= dim))
    return joined([apart(call.first, [dim], "it writes to single rows"), source])

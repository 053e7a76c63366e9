"""The operators that a model may use: aten's functional and in-place compute ops, by schema, and control flow.

An archive comes from a client, and an op can do more than compute: read files, take pointers, load code. An op is
admitted only if its schema shows that it only computes. A new torch op that takes a path is refused by its arguments.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TYPE = re.compile(
    r"(?:(?:List|Optional)\[)*(?:Tensor|int|bool|number|float|complex|Device|Generator|str)\]*", re.ASCII
)
_CHOICES = _names(
    """
    approximate assert_msg driver equation indexing interpolation mode norm ord p pad_mode padding padding_side
    reduce rounding_mode side UPLO
    """
)
"""Names of string arguments that select an algorithm."""
_NOT_COMPUTE = re.compile(
    r"_|.*backward|(?:cudnn|fbgemm|from|fused_moving|miopen|mkldnn|mps|nested|pin|quantize|quantized|record|requires"
    r"|resize|retain|set|sparse|to_mkldnn|to_sparse)(?:_|$)|empty_quantized|convolution_overrideable"
)
"""Names of ops that are private, change storages, or whose operands hold handles."""
_PRIVATE = _names(
    """
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
    _adaptive_avg_pool2d _adaptive_avg_pool3d _addmm_activation _aminmax _batch_norm_no_update _cast_Byte
    _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _cdist_forward _conj
    _conj_physical _conv_depthwise2d _convert_weight_to_int4pack_for_cpu _convolution _convolution_mode
    _dim_arange _embedding_bag _embedding_bag_forward_only _euclidean_dist
    _fake_quantize_learnable_per_tensor_affine _fft_c2c _fft_c2r _fft_r2c _functional_assert_async
    _functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
    _fused_rms_norm _grouped_mm _int_mm _is_all_true _is_any_true _linalg_det _linalg_eigh _linalg_eigvals
    _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _logcumsumexp _lu_with_info _masked_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _native_multi_head_attention _neg_view _pack_padded_sequence _pad_circular _pad_enum _pad_packed_sequence
    _pdist_forward _prelu_kernel _reshape_alias _reshape_copy _safe_softmax _scaled_dot_product_attention_math
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _scaled_mm _shape_as_tensor _softmax _stack _to_copy
    _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_index_put
    _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _weight_int4pack_mm_for_cpu _weight_int8pack_mm _weight_norm _weight_norm_interface
    """
)
"""Private ops that exported programs contain."""
_WITHOUT_TENSOR = _names(
    """
    _assert_async _assert_scalar _assert_tensor_metadata _local_scalar_dense dim is_complex is_floating_point
    is_nonzero item numel size storage_offset stride sym_constrain_range sym_constrain_range_for_size sym_numel
    sym_size sym_storage_offset sym_stride
    """
)
"""Ops that return no tensor: checks, shapes, and numbers read from tensors."""
_ASSERTIONS = _names(
    "_assert_tensor_metadata _assert_scalar _assert_async sym_constrain_range sym_constrain_range_for_size"
)
_CONTROL_FLOW = _names(
    """
    associative_scan cond map_impl scan while_loop wrap_with_autocast wrap_with_set_grad_enabled
    """
)
NUMBER_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (
            operator,
            "add and_ eq floordiv ge getitem gt le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv xor",
        ),
        (math, "acos asin atan ceil cos cosh exp floor log log2 pow sin sinh sqrt tan tanh trunc"),
        (torch, "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"),
    )
    for name in names.split()
}
"""Python's functions for shape arithmetic, by their names in archives and the cache."""
_OPERATOR = re.compile(r"torch\.ops\.(aten|higher_order)\.([A-Za-z_0-9]+)(?:\.([A-Za-z_0-9]+))?", re.ASCII)

LOWERED = _names(
    """
    aten::mkldnn_rnn_layer mkldnn::_convolution_pointwise mkldnn::_convolution_pointwise_ mkldnn::_linear_pointwise
    """
)
"""Operators that lowering adds to programs; archives must not contain them."""


@lru_cache(maxsize=4096)
def allows_target(text: str) -> bool:
    """Whether an archive's program may call a target by name: `torch.ops.aten.relu.default`, `_operator.mul`."""
    if text.removeprefix("_") in NUMBER_FUNCTIONS:  # archives write _operator
        return True
    match = _OPERATOR.fullmatch(text)
    if match is None:
        return False
    namespace, name, overload = match.groups()
    if namespace == "higher_order":
        return overload is None and name in _CONTROL_FLOW
    op: Any = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    return allows(op)


def allows(op: Any) -> bool:
    """Whether an archive's program may call this operator."""
    if isinstance(op, HigherOrderOperator):
        return str(op) in _CONTROL_FLOW
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    schema = op._schema
    name = schema.name.removeprefix("aten::")
    if _NOT_COMPUTE.match(name) and name not in _PRIVATE | _WITHOUT_TENSOR:
        return False
    if name not in _WITHOUT_TENSOR and not any("Tensor" in str(r.type) for r in schema.returns):
        # In-place ops on lists return nothing; torch.export never writes them.
        return False
    return all(
        _TYPE.fullmatch(str(a.type)) and ("str" not in str(a.type) or a.name in _CHOICES) for a in schema.arguments
    )


def allows_lowered(op: Any) -> bool:
    """Whether a lowered program may call this operator: those of `allows`, and those that lowering introduces."""
    return allows(op) or (isinstance(op, OpOverload) and op._schema.name in LOWERED)


def is_assertion(op: Any) -> bool:
    """Whether an operator only checks its operands: export's run-time assertions."""
    return getattr(op, "_opname", getattr(op, "__name__", "")) in _ASSERTIONS


def is_random(op: Any) -> bool:
    """Whether an operator draws random numbers, at least with some arguments."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers. Attention and recurrent layers do so only with dropout."""
    if not is_random(op):
        return False
    given = {a.name: a.default_value for a in op._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    off = {"train": (False,), "training": (False,), "dropout": (0.0,), "dropout_p": (0.0,)}
    return not any(name in given and given[name] in values for name, values in off.items())

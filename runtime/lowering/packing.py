"""Packed weights: convolution and linear weights in the blocked layouts of oneDNN's kernels on this machine.

A packed weight is an opaque tensor. The weights file has its bytes and the serialized description of their layout. From
both, torch's stable C interface for AOTInductor creates the same opaque tensor over bytes at any address.
"""

import base64
import ctypes
import platform
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohabit.runtime.choices import chosen
from cohabit.runtime.errors import UnsupportedModel

_onednn: Any = torch.ops.mkldnn

Window = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""A convolution's padding, stride, dilation and groups, in the order of oneDNN's operators."""


def _operator(name: str, overload: str) -> Any:
    return getattr(getattr(_onednn, name, None), overload, None)


CONVOLUTION = _operator("_convolution_pointwise", "default")
CONVOLUTION_SUM = _operator("_convolution_pointwise", "binary")
CONVOLUTION_SUM_IN_PLACE = _operator("_convolution_pointwise_", "binary")
LINEAR = _operator("_linear_pointwise", "default")
LINEAR_SUM = _operator("_linear_pointwise", "binary")
_REORDER_LSTM = _operator("_reorder_mkldnn_rnn_layer_weight", "default")
"""oneDNN's operators; each is None where torch lacks it."""
_LEAST_SECONDS = 2e-3
"""Seconds for which each layout is measured, if oneDNN expects several."""


@cache
def unavailable() -> str | None:
    """Return why this torch cannot compute with packed weights, or None if it can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch was built without oneDNN"
    if None in (CONVOLUTION, CONVOLUTION_SUM, CONVOLUTION_SUM_IN_PLACE, LINEAR, LINEAR_SUM, _REORDER_LSTM):
        return "torch lacks oneDNN's fused operators"
    try:
        return _self_test()
    except (AttributeError, OSError, RuntimeError, TypeError, UnsupportedModel) as error:
        return f"{type(error).__name__}: {error}"


def _self_test() -> str | None:
    """Compute a linear layer and a convolution from relocated bytes, and compare them with plain kernels."""
    x, weight = torch.linspace(-1, 1, 4 * 16).view(4, 16), torch.linspace(-1, 1, 32 * 16).view(32, 16)
    image, kernel = x.view(1, 16, 2, 2), weight.view(32, 16, 1, 1)
    window = ((0, 0), (1, 1), (1, 1), 1)
    with torch.inference_mode():
        moved = _relocated(pack_linear(weight, [4]))
        linear = LINEAR(x, moved[0], None, "none", [], "")
        moved_kernel = _relocated(pack_convolution(kernel, window, [(1, 16, 2, 2)]))
        convolved = CONVOLUTION(image, moved_kernel[0], None, *window, "none", [], "")
        right = torch.allclose(linear, x @ weight.T, atol=1e-4) and torch.allclose(
            convolved, torch.conv2d(image, kernel), atol=1e-4
        )
    return None if right else "a packed layer computes another result than a plain one"


def _relocated(packed: torch.Tensor) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Return the same weight over a copy of its bytes, and the copy, which must outlive it."""
    raw = np.empty(stored_bytes(packed) + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][: stored_bytes(packed)]
    raw[:] = raw_bytes(packed)
    return packed_tensor(raw.ctypes.data, packed.dtype, tuple(packed.shape), layout_of(packed)), raw


def machine() -> str:
    """Describe what packed bytes are valid for: the processor, the versions of torch and oneDNN, and the thread count.

    With another number of threads, oneDNN may expect another layout, and would convert the weights in every call.
    """
    threads = torch.get_num_threads()
    return f"{_machine()}, {threads} thread{'' if threads == 1 else 's'}"


@cache
def _machine() -> str:
    configured = torch.__config__.show().splitlines()
    onednn = next((line.strip(" -") for line in configured if "MKL-DNN" in line or "oneDNN" in line), "no oneDNN")
    capability = torch.backends.cpu.get_cpu_capability()
    numbers = processor("cpu family", "model").split()
    variant = f" (family {numbers[0]}, model {numbers[1]})" if len(numbers) == 2 else ""
    onednn = onednn.partition(" (")[0]  # its hash is that of torch's version
    return f"{processor()}{variant}, {capability}, torch {torch.__version__}, {onednn}"


def processor(*fields: str) -> str:
    """Return the processor's name, or other fields of `/proc/cpuinfo`."""
    names = fields or ("model name",)
    with suppress(OSError, KeyError):
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        values = dict(line.split("\t", 1) for line in first.splitlines() if "\t" in line)
        return " ".join(values[name].strip("\t: ") for name in names)
    return platform.processor() or platform.machine()


def supports(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for a type, which oneDNN's kernels need to compute in it.

    On x86 without AVX512-BF16 and AMX, oneDNN would convert each bfloat16 operand instead.
    """
    if dtype is torch.bfloat16:
        emulated = platform.machine() in ("x86_64", "AMD64") and not (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
        return bool(_onednn._is_mkldnn_bf16_supported()) and not emulated
    if dtype is torch.float16:
        return bool(_onednn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def pack_linear(weight: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Pack a linear layer's weight for the largest of these row counts. Kernels accept the layout for any row count."""
    packed: torch.Tensor = _onednn._reorder_linear_weight(weight, max(rows))
    return packed


def pack_convolution(weight: torch.Tensor, window: Window, sizes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Pack a convolution's weight for images of these sizes (BCHW).

    If a weight's layout is not the one that a kernel expects, the kernel converts the weight in every call. If oneDNN
    expects different layouts for these sizes, the layout with the least total time is chosen, once on a machine.
    """
    candidates = {layout_of(packed): packed for packed in convolution_layouts(weight, window, sizes)}

    def seconds(layout: str) -> float:
        return sum(_seconds(partial(_convolve, candidates[layout], window, size)) for size in sizes)

    layouts = list(candidates)
    if len(layouts) == 1:
        return candidates[layouts[0]]
    question = ["convolution", weight.shape, str(weight.dtype), window, sizes]
    return candidates[chosen(machine(), question, layouts, lambda: min(layouts, key=seconds))]


def convolution_layouts(
    weight: torch.Tensor, window: Window, sizes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return a convolution's weight in each layout that oneDNN expects for images of these sizes (BCHW)."""
    by_layout: dict[str, torch.Tensor] = {}
    for size in sizes:
        packed = _onednn._reorder_convolution_weight(weight, *window, size)
        by_layout.setdefault(layout_of(packed), packed)
    return list(by_layout.values())


def pack_lstm(by_input: torch.Tensor, by_state: torch.Tensor, *, reverse: bool) -> list[torch.Tensor]:
    """Pack both weights of one direction of an LSTM layer with biases. The layout is the same for every batch."""
    hidden, size = by_state.shape[1], by_input.shape[1]
    packed: list[torch.Tensor] = _REORDER_LSTM(by_input, by_state, hidden, reverse, True, False, [1, 1, size])
    return packed


def _convolve(packed: torch.Tensor, window: Window, size: tuple[int, ...]) -> None:
    image = torch.zeros(size, dtype=packed.dtype).contiguous(memory_format=torch.channels_last)
    CONVOLUTION(image, packed, None, *window, "none", [], "")


def _seconds(call: Callable[[], None]) -> float:
    """Return the shortest time of a call, measured for `_LEAST_SECONDS`."""
    call()
    least, end = float("inf"), time.perf_counter() + _LEAST_SECONDS
    while (start := time.perf_counter()) < end:
        call()
        least = min(least, time.perf_counter() - start)
    return least


def is_packed(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch._mkldnn  # type: ignore[attr-defined]


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a weight in a weights file, without alignment."""
    return int(_onednn._nbytes(tensor)) if is_packed(tensor) else tensor.nbytes


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for two living tensors exactly if they share their bytes."""
    return int(_onednn.data_ptr(tensor)) if is_packed(tensor) else int(tensor.untyped_storage()._cdata)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of the bytes of a packed weight. The tensor must outlive it."""
    array = (ctypes.c_uint8 * stored_bytes(tensor)).from_address(int(_onednn.data_ptr(tensor)))
    return np.ctypeslib.as_array(array)


def layout_of(tensor: torch.Tensor) -> str:
    """Return the serialized description of a packed weight's layout, as text."""
    description = _onednn._get_mkldnn_serialized_md(tensor)
    return base64.b64encode(zlib.compress(bytes(description.numpy()), 9)).decode()


def packed_tensor(address: int, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """Return a packed weight over existing bytes, which must outlive it. Raises UnsupportedModel."""
    library, sizes = _library(), (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*torch.empty(shape, device="meta").stride())
    description, handle = _description(layout), ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(shape)),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        description,
        ctypes.c_int64(len(description)),
    )
    if failed:
        raise UnsupportedModel(f"torch {torch.__version__} cannot make a packed tensor of shape {list(shape)}")
    capsule = _new_capsule()(handle, None, None)
    tensor: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)
    return tensor


@cache
def _library() -> Any:
    """The library with torch's stable C interface."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


@cache
def _new_capsule() -> Any:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return prototype(("PyCapsule_New", ctypes.pythonapi))


@lru_cache(maxsize=4096)
def _description(layout: str) -> bytes:
    return zlib.decompress(base64.b64decode(layout))

"""Forms of a linear layer by rows and sizes: which is chosen in float32, and the times of int8 and ONNX Runtime.

ONNX Runtime is left out where it is not installed (`pip install 'cohabit[bench]'`).
"""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.record import parser_of, publish, table_of
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.encoding import int8_kernel
from cohabit.runtime.lowering.fused_ops import linear_by_columns, linear_int8, linear_transposed
from cohabit.runtime.lowering.rewrites.linear_forms import LayerShape, cold_seconds, fastest

ROWS = (1, 8, 40, 128, 256)
SIZES = ((64, 64), (256, 256), (256, 688), (512, 512), (384, 1536), (1536, 384), (768, 768), (1024, 4096))
COLD_BYTES = 16 << 20
MOST_WEIGHTS = 20
SECONDS = 0.1

Call = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser_of("benchmarks.kernels", __doc__, has_folder=False).parse_args(argv)
    cells = [(rows, *sizes) for sizes in SIZES for rows in ROWS]
    with torch.inference_mode():
        found = [_compared(*cell) for cell in track(cells, "timing", console=Console(stderr=True))]
    has_peer = "ONNX Runtime" in found[0][1]
    forms = dict.fromkeys(form for _, seconds in found for form in seconds)
    over_packed = [seconds[chosen] / seconds["packed"] for chosen, seconds in found]
    over_peer = [seconds[chosen] / seconds["ONNX Runtime"] for chosen, seconds in found] if has_peer else []
    rows = []
    for number, (cell, (chosen, seconds)) in enumerate(zip(cells, found, strict=True)):
        rows.append(
            {
                "rows, in, out": ", ".join(map(str, cell)),
                **{form: f"{seconds[form] * 1e6:.1f}" if form in seconds else "-" for form in forms},
                "chosen": chosen,
                "over packed": f"{over_packed[number]:.2f}",
                **({"over ONNX Runtime": f"{over_peer[number]:.2f}"} if has_peer else {}),
            }
        )
    summary = f"Geometric means: chosen over packed {statistics.geometric_mean(over_packed):.2f}"
    if in_int8 := [seconds["int8"] / seconds[chosen] for chosen, seconds in found if "int8" in seconds]:
        summary += f", int8 over chosen {statistics.geometric_mean(in_int8):.2f}"
    if has_peer:
        summary += f", over ONNX Runtime {statistics.geometric_mean(over_peer):.2f}"
    about = (
        "Microseconds of a linear layer with a bias, one thread, in float32 or with the weight in int8: the lower"
        f" quartile over different weights in turns, at least {COLD_BYTES >> 20} MiB of them or {MOST_WEIGHTS}."
        " *Chosen* is the form in float32 that lowering chooses for that number of rows alone. Instruction set:"
        f" {torch.backends.cpu.get_cpu_capability()}.\n"
    )
    publish(
        options, "Forms of a linear layer on this processor", [about, table_of(rows, shown=False), f"{summary}.\n"]
    )
    return 0


def _compared(rows: int, inputs: int, outputs: int) -> tuple[str, dict[str, float]]:
    """Return the form that is chosen, and the seconds of each."""
    count = min(MOST_WEIGHTS, max(3, COLD_BYTES // (4 * inputs * outputs)))
    weights = [torch.randn(outputs, inputs) / math.sqrt(inputs) for _ in range(count)]
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    calls: dict[str, list[Call]] = {
        "plain": [partial(linear_by_columns, x, w, bias) for w in weights],
        "transposed": [partial(linear_transposed, x, w.t().contiguous(), bias) for w in weights],
        "packed": [
            partial(packing.LINEAR, x, packing.pack_linear(w, [rows]), bias, "none", [], "") for w in weights
        ],
    }
    if int8_kernel.takes(outputs, inputs):
        terms = torch.stack([torch.ones(outputs), bias])
        calls["int8"] = [partial(linear_int8, x, w.to(torch.int8), terms) for w in weights]
    if find_spec("onnxruntime") is not None:
        calls["ONNX Runtime"] = [_onnx(x, w, bias) for w in weights]
    multiplications = rows * inputs * outputs
    shape = LayerShape(
        inputs,
        outputs,
        (rows,),
        (1,),
        has_bias=True,
        fused=None,
        adds=False,
        packs=multiplications >= 1 << 20,
        threads=torch.get_num_threads(),
    )
    return fastest(shape), {form: cold_seconds(own, SECONDS) for form, own in calls.items()}


def _onnx(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Call:
    """A run of ONNX Runtime's own layer, its input and output bound to memory."""
    onnx, onnxruntime = import_module("onnx"), import_module("onnxruntime")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    shape = (x.shape[0], weight.shape[0])
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "layer",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, list(shape))],
        [numpy_helper.from_array(weight.t().contiguous().numpy(), "w"), numpy_helper.from_array(bias.numpy(), "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("x", x.numpy())
    binding.bind_output("y", "cpu")
    return partial(session.run_with_iobinding, binding)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

"""What `cohabit import` makes of ONNX files, compared with ONNX Runtime, and the reason where one is refused."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.exporting import export
from cohabit.server.importing.onnx.converted import OnnxModule
from cohabit.server.importing.onnx.indexing import PAIRS
from cohabit.server.importing.onnx.reading import read_graph
from cohabit.server.importing.onnx.registry import OPERATORS
from cohabit.server.importing.onnx.source import from_onnx
from cohabit.server.triton.model_config import read_config

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> Array:
    return RANDOM.uniform(0.1, 0.9, shape).astype(np.float32)


def below(most: int, *shape: int, least: int = 0, dtype: Any = np.int64) -> Array:
    return RANDOM.integers(least, most, shape).astype(dtype)


def ints(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


class Case:
    """One node: its inputs that vary, those that are initializers, and its attributes."""

    def __init__(
        self,
        op: str,
        x: Sequence[Array | None],
        *constants: Array | None,
        opset: int = 17,
        outputs: int = 1,
        **attrs: Any,
    ) -> None:
        self.op, self.x, self.constants = op, x, constants
        self.opset, self.outputs, self.attrs = opset, outputs, attrs

    def __repr__(self) -> str:
        attributes = ",".join(f"{name}={value}" for name, value in self.attrs.items())
        return f"{self.op}-{self.opset}-{attributes}"


def saved(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Array],
    constants: Mapping[str, Array],
    outputs: Sequence[str],
    opset: int,
    dims: Mapping[str, Sequence[Any]] | None = None,
) -> Path:
    """Write a graph. `dims` are the inputs' dimensions, if they are not those of the examples."""
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(a.dtype), list((dims or {}).get(name, a.shape))
        )
        for name, a in inputs.items()
    ]
    found = [onnx.ValueInfoProto(name=name) for name in outputs]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(list(nodes), "graph", given, found, weights)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def session(path: Path) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def require_same(path: Path, inputs: Mapping[str, Array], tolerance: float = 1e-5) -> None:
    """Compare a file's outputs with ONNX Runtime's."""
    module = OnnxModule(read_graph(path))
    expected = session(path).run(None, dict(inputs))
    found = module(**{name: torch.tensor(array) for name, array in inputs.items()})
    for tensor, array in zip(found.values(), expected, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_allclose(tensor.numpy(), array, tolerance, tolerance)


X = normal(2, 3, 4)
IMAGE = normal(2, 4, 7, 6)
BATCH = [normal(4), normal(4), normal(4), positive(4)]
UNARY = (
    "Abs Asinh Atan Ceil Cos Cosh Erf Exp Floor HardSwish Neg Relu Round Sigmoid Sign Sin Sinh Softplus Tan Tanh"
)
OF_SHARES = "Acos Asin Atanh Log Reciprocal Softsign Sqrt"
BINARY = "Add Sub Mul Div Equal Less LessOrEqual Greater GreaterOrEqual Max Min Sum Mean"
REDUCTIONS = "L1 L2 LogSumExp Max Mean Min Prod Sum SumSquare"

ELEMENTWISE = [
    *(Case(op, [X]) for op in UNARY.split()),
    *(Case(op, [positive(2, 3)]) for op in OF_SHARES.split()),
    Case("Acosh", [positive(2, 3) + 1]),
    Case("Mish", [X], opset=18),
    *(Case(op, [X], normal(4)) for op in BINARY.split()),
    *(Case(op, [X], np.float32(0.5)) for op in BINARY.split()),
    *(Case(op, [X > 0], normal(4) > 0) for op in ("And", "Or", "Xor")),
    Case("Not", [X > 0]),
    *(Case(f"Bitwise{op}", [below(99, 5)], below(99, 5), opset=18) for op in ("And", "Or", "Xor")),
    Case("BitwiseNot", [below(99, 5)], opset=18),
    Case("Div", [below(9, 5, least=-9)], ints(2, -2, 3, 4, 5)),
    Case("Mod", [below(9, 5, least=-9)], ints(2, -2, 3, 4, 5)),
    Case("Mod", [normal(5)], positive(5), fmod=1),
    Case("Pow", [positive(2, 3)], np.float32(2.0)),
    Case("Pow", [positive(2, 3)], normal(3)),
    Case("Pow", [positive(2, 3)], ints(1, 2, 3)),
    Case("Where", [X > 0, X], np.float32(-3e38)),
    Case("Where", [X > 0], normal(4), normal(3, 1)),
    Case("Clip", [X], np.float32(-0.5), np.float32(0.5)),
    Case("Clip", [X], None, np.float32(0.5)),
    Case("Clip", [X, np.float32(-0.5)], np.float32(0.5)),
    Case("IsNaN", [np.array([1, np.nan], np.float32)]),
    Case("IsInf", [np.array([1, np.inf, -np.inf], np.float32)], detect_negative=0),
    *(Case("Cast", [X * 3], to=to) for to in (TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT16)),
    Case("CastLike", [X], ints(1), opset=19),
    Case("LeakyRelu", [X], alpha=0.2),
    Case("Elu", [X], alpha=0.5),
    Case("Celu", [X], alpha=0.5),
    Case("Selu", [X]),
    Case("HardSigmoid", [X], alpha=1 / 6),
    Case("PRelu", [IMAGE], normal(4, 1, 1)),
    Case("PRelu", [X], normal(4)),
    *(Case("Gelu", [X], opset=20, approximate=approximate) for approximate in ("none", "tanh")),
    *(Case(op, [X], opset=opset) for op in ("Softmax", "LogSoftmax") for opset in (11, 13)),
    *(Case(op, [X], axis=1, opset=opset) for op in ("Softmax", "LogSoftmax") for opset in (11, 13)),
    Case("CumSum", [X], np.array(1), exclusive=1, reverse=1),
    Case("CumSum", [X], np.array(-1)),
    *(Case(f"Reduce{name}", [X], axes=[1], keepdims=0, opset=11) for name in REDUCTIONS.split()),
    *(Case(f"Reduce{name}", [X], ints(-1, 0), opset=18) for name in REDUCTIONS.split()),
    Case("ReduceLogSum", [positive(2, 3)], axes=[1]),
    Case("ReduceSum", [X], ints(), noop_with_empty_axes=1),
    Case("ReduceMean", [X]),
    Case("ArgMax", [X], axis=1),
    Case("ArgMin", [below(2, 3, 4, dtype=np.float32)], axis=1, keepdims=0, select_last_index=1),
    Case("TopK", [X], ints(2), axis=1, outputs=2),
    Case("TopK", [X], ints(2), largest=0, outputs=2),
]
PRODUCTS = [
    Case("MatMul", [X], normal(4, 5)),
    Case("MatMul", [X, normal(2, 4, 5)]),
    Case("MatMul", [normal(4)], normal(4, 5)),
    Case("Gemm", [normal(2, 3)], normal(4, 3), normal(4), transB=1),
    Case("Gemm", [normal(3, 2)], normal(3, 4), normal(2, 4), transA=1, alpha=0.5, beta=2.0),
    Case("Gemm", [normal(2, 3)], normal(3, 4)),
    Case("Einsum", [X, normal(2, 5, 4)], equation="bij,bkj->bik"),
    Case("Conv", [IMAGE], normal(6, 2, 3, 3), normal(6), group=2, pads=[1, 1, 1, 1], strides=[2, 2]),
    Case("Conv", [IMAGE], normal(6, 4, 3, 2), pads=[0, 1, 2, 0], dilations=[2, 1]),
    *(
        Case("Conv", [IMAGE], normal(5, 4, 3, 4), auto_pad=pad, strides=[2, 1])
        for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    Case("Conv", [X], normal(5, 3, 2), normal(5)),
    Case("Conv", [normal(1, 2, 4, 5, 6)], normal(3, 2, 2, 2, 2)),
    Case("ConvTranspose", [IMAGE], normal(4, 3, 2, 2), normal(3), strides=[2, 2]),
    Case("ConvTranspose", [IMAGE], normal(4, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    Case("ConvTranspose", [IMAGE], normal(4, 3, 3, 3), strides=[2, 2], pads=[0, 1, 2, 1], group=2),
    Case("MaxPool", [IMAGE], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    Case("MaxPool", [IMAGE], kernel_shape=[3, 2], strides=[2, 2], pads=[0, 0, 1, 1], ceil_mode=1),
    Case("MaxPool", [IMAGE], kernel_shape=[2, 2], dilations=[2, 2]),
    Case("MaxPool", [IMAGE], kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
    Case("MaxPool", [X], kernel_shape=[2]),
    Case("AveragePool", [IMAGE], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    Case("AveragePool", [IMAGE], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    Case("AveragePool", [IMAGE], kernel_shape=[3, 3], strides=[2, 2], pads=[0, 1, 1, 0]),
    Case("AveragePool", [IMAGE], kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1),
    Case("GlobalAveragePool", [IMAGE]),
    Case("GlobalMaxPool", [IMAGE]),
    Case("BatchNormalization", [IMAGE], *BATCH, epsilon=1e-3),
    Case("InstanceNormalization", [IMAGE], normal(4), normal(4)),
    Case("GroupNormalization", [IMAGE], normal(2), normal(2), num_groups=2, opset=18),
    Case("GroupNormalization", [IMAGE], normal(4), normal(4), num_groups=2, opset=21),
    Case("LayerNormalization", [X], normal(4), normal(4)),
    Case("LayerNormalization", [X], normal(3, 4), axis=1, epsilon=1e-3),
    Case("LayerNormalization", [X], normal(4), normal(4), outputs=3),
    Case("LRN", [IMAGE], size=3, alpha=0.1),
    Case("LpNormalization", [X], axis=1, p=2),
    Case("GridSample", [IMAGE, positive(2, 3, 3, 2) * 3 - 1.5], align_corners=0, opset=16),
    Case("GridSample", [IMAGE, positive(2, 3, 3, 2) * 3 - 1.5], mode="nearest", padding_mode="border", opset=16),
]
SHAPING = [
    Case("Identity", [X]),
    Case("Dropout", [X]),
    Case("Shape", [X]),
    Case("Shape", [X], start=1, end=-1),
    Case("Size", [X]),
    Case("Reshape", [X], ints(0, -1)),
    Case("Flatten", [X]),
    Case("Flatten", [X], axis=2),
    Case("Flatten", [X], axis=0),
    Case("Transpose", [X]),
    Case("Transpose", [X], perm=[1, 0, 2]),
    Case("Squeeze", [normal(2, 1, 3, 1)], axes=[1], opset=11),
    Case("Squeeze", [normal(2, 1, 3, 1)], ints(-1)),
    Case("Squeeze", [normal(2, 1, 3, 1)]),
    Case("Unsqueeze", [X], axes=[1, 3], opset=11),
    Case("Unsqueeze", [X], ints(-1, 0)),
    Case("Expand", [normal(3, 1)], ints(2, 1, 4)),
    Case("Expand", [X], ints(1)),
    Case("Tile", [X], ints(1, 2, 3)),
    Case("Concat", [X], normal(2, 5, 4), axis=1),
    Case("Split", [X], split=[1, 3], axis=2, outputs=2, opset=11),
    Case("Split", [X], ints(1, 2), axis=1, outputs=2),
    Case("Split", [X], axis=2, num_outputs=3, outputs=3, opset=18),
    Case("Slice", [X], ints(1, -3), ints(1 << 62, -1), ints(0, 2)),
    Case("Slice", [X], ints(-1), ints(-(1 << 62)), ints(2), ints(-2)),
    Case("Slice", [X], ints(3), ints(0), ints(2), ints(-1)),
    Case("Slice", [X], ints(0), ints(9), ints(1), ints(2)),
    Case("Gather", [X], ints(0, -1), axis=1),
    Case("Gather", [X], np.array(-1), axis=2),
    Case("Gather", [X], np.array([[1]]), axis=1),
    Case("Gather", [X, below(3, 2, 2, least=-3)], axis=1),
    Case("GatherElements", [X], below(3, 2, 2, 4, least=-3), axis=1),
    Case("GatherND", [X], below(2, 5, 2)),
    Case("GatherND", [X], below(3, 2, 5, 1, least=-3), batch_dims=1),
    Case("ScatterElements", [X], below(3, 2, 1, 4), normal(2, 1, 4), axis=1),
    Case("ScatterElements", [X], below(3, 2, 2, 4), normal(2, 2, 4), axis=1, reduction="add", opset=16),
    Case("ScatterND", [X], ints(1, 0)[:, None], normal(2, 3, 4)),
    Case("OneHot", [below(5, 2, 3, least=-5)], ints(5), np.array([0.5, 2], np.float32), axis=1),
    Case("Pad", [X], ints(0, 1, 2, 0, -1, 0), np.float32(1.5)),
    *(Case("Pad", [X], ints(0, 1, 2, 0, 0, 1), mode=mode) for mode in ("reflect", "edge")),
    Case("Pad", [X], ints(1, 2), None, ints(2), opset=18),
    *(Case("DepthToSpace", [IMAGE], blocksize=2, mode=mode) for mode in ("DCR", "CRD")),
    Case("SpaceToDepth", [normal(1, 2, 4, 6)], blocksize=2),
    Case("Trilu", [X], np.array(1), upper=0),
    Case("Range", [], np.array(1), np.array(9), np.array(2)),
    Case("ConstantOfShape", [], ints(2, 3), value=numpy_helper.from_array(ints(7))),
]
MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDED = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
SCALES, LESS = np.array([1, 1, 2, 2], np.float32), np.array([1, 1, 0.6, 1.7], np.float32)
RESIZED = [
    *(
        Case("Resize", [IMAGE], None, scales, mode=mode, coordinate_transformation_mode=rule)
        for mode in ("linear", "cubic")
        for rule in MODES
        if (mode, rule) != ("cubic", "asymmetric")
        for scales in (SCALES, LESS)
    ),
    *(
        Case("Resize", [IMAGE], None, scales, coordinate_transformation_mode=rule, nearest_mode=rounded)
        for rule in MODES
        for rounded in ROUNDED
        for scales in (SCALES, LESS)
    ),
    *(Case("Resize", [IMAGE], None, None, ints(2, 4, 5, 9), mode=mode) for mode in ("nearest", "linear", "cubic")),
    Case("Resize", [IMAGE], None, None, ints(5, 9), mode="linear", axes=[2, 3], opset=18),
    Case("Resize", [X], None, np.array([1, 1, 2], np.float32), mode="linear"),
    Case("Resize", [X], None, np.array([1, 2, 1], np.float32), nearest_mode="floor"),
]
SEQUENCE, LAYER = normal(5, 2, 3), (4, 3, 1)
RECURRENT = [
    *(
        Case(
            op,
            [SEQUENCE],
            normal(count, gates * 4, 3),
            normal(count, gates * 4, 4),
            normal(count, 2 * gates * 4),
            None,
            normal(count, 2, 4),
            direction=direction,
            hidden_size=4,
            outputs=outputs,
            **attrs,
        )
        for op, gates, outputs, attrs in (
            ("LSTM", 4, 3, {}),
            ("GRU", 3, 2, {"linear_before_reset": 1}),
            ("GRU", 3, 2, {}),
            ("RNN", 1, 2, {}),
        )
        for direction, count in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
        if attrs or op != "GRU" or count == 1
    ),
    Case("LSTM", [SEQUENCE], normal(1, 16, 3), normal(1, 16, 4), hidden_size=4, outputs=2),
]
BYTES = below(255, 2, 3, dtype=np.uint8)
QUANTIZED = [
    Case("DequantizeLinear", [BYTES], positive(3), below(9, 3, dtype=np.uint8), axis=1),
    Case("DequantizeLinear", [BYTES], np.float32(0.1)),
    Case("QuantizeLinear", [X], np.float32(0.02), np.int8(3)),
    Case("QuantizeLinear", [X], positive(4) / 10, below(9, 4, dtype=np.uint8), axis=-1),
    Case("QuantizeLinear", [X], np.float32(0.02)),
    Case("DynamicQuantizeLinear", [X], outputs=3),
    Case("MatMulInteger", [BYTES], below(127, 3, 4, least=-127, dtype=np.int8), np.uint8(7)),
    Case("MatMulInteger", [BYTES], below(127, 3, 4, dtype=np.uint8), np.uint8(7), np.uint8(3)),
    Case(
        "ConvInteger", [below(255, 1, 2, 5, 5, dtype=np.uint8)], below(255, 3, 2, 3, 3, dtype=np.uint8), np.uint8(7)
    ),
    Case(
        "QLinearMatMul",
        [BYTES],
        *(np.float32(0.1), np.uint8(9), below(9, 3, 4, dtype=np.uint8), np.float32(0.2), np.uint8(4)),
        *(np.float32(0.5), np.uint8(100)),
    ),
    Case(
        "QLinearConv",
        [below(255, 1, 2, 5, 5, dtype=np.uint8)],
        *(np.float32(0.1), np.uint8(9), below(9, 3, 2, 3, 3, dtype=np.int8), positive(3), np.zeros(3, np.int8)),
        *(np.float32(0.5), np.uint8(100), below(99, 3, dtype=np.int32)),
        pads=[1, 1, 1, 1],
    ),
]
CONTRIBUTED = [
    *(Case(f"com.microsoft.{op}", [X]) for op in ("Gelu", "FastGelu", "QuickGelu")),
    Case("com.microsoft.BiasGelu", [X], normal(4)),
    Case("com.microsoft.FastGelu", [X], normal(4)),
    Case("com.microsoft.FusedMatMul", [X, normal(2, 5, 4)], transB=1, alpha=0.5),
    Case("com.microsoft.SkipLayerNormalization", [X, normal(2, 3, 4)], normal(4), normal(4), normal(4)),
]
CASES = [*ELEMENTWISE, *PRODUCTS, *SHAPING, *RESIZED, *RECURRENT, *QUANTIZED, *CONTRIBUTED]


def write(case: Case, path: Path) -> dict[str, Array]:
    """Write a graph of one node; returns its inputs."""
    inputs = {f"x{i}": np.asarray(array) for i, array in enumerate(case.x) if array is not None}
    constants = {f"c{i}": np.asarray(array) for i, array in enumerate(case.constants) if array is not None}
    names = [f"c{i}" if array is not None else "" for i, array in enumerate(case.constants)]
    outputs = [f"y{i}" for i in range(case.outputs)]
    domain, _, op = case.op.rpartition(".")
    node = helper.make_node(op, [*inputs, *names], outputs, domain=domain, **case.attrs)
    saved(path, [node], inputs, constants, outputs, case.opset)
    return inputs


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_an_operator_computes_what_onnx_runtime_does(case: Case, tmp_path: Path) -> None:
    inputs = write(case, tmp_path / "one.onnx")
    require_same(tmp_path / "one.onnx", inputs)


def test_every_operator_has_a_case() -> None:
    assert OPERATORS.keys() - {case.op for case in CASES} == {PAIRS}


def test_an_index_that_an_exporter_flattened_is_recovered(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Flatten", ["x"], ["all"], axis=2),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["size"]),
        helper.make_node("Mul", ["row", "size"], ["start"]),
        helper.make_node("Add", ["column", "start"], ["index"]),
        helper.make_node("Gather", ["all", "index"], ["y"]),
    ]
    constants = {"one": np.array(1), "row": ints(0, 1)[:, None], "column": ints(2, 0, 1)}
    for x in (X, X[:, :, 0]):
        path = saved(tmp_path / "a.onnx", nodes, {"x": x}, constants, ["y"], 17)
        require_same(path, {"x": x})
        assert PAIRS in {node.op for node in read_graph(path).nodes}


class Drawn:
    """A random graph of operators that keep the shape [batch, tokens, 4] or change it in known ways."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.values = ["x"]
        for _ in range(12):
            getattr(
                self, str(self.random.choice(["unary", "binary", "layer", "attention", "reshaped", "sliced"]))
            )()

    def add(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> str:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, f"node {len(self.nodes)}", **attrs))
        return names[0]

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def floats(self, *shape: int) -> str:
        return self.constant(self.random.uniform(-1, 1, shape).astype(np.float32))

    def value(self) -> str:
        return str(self.random.choice(self.values))

    def size(self, value: str, axis: int) -> str:
        """A size of a value, as exporters compute it, as a vector of one number."""
        chosen = self.add("Gather", self.add("Shape", value), self.constant(np.int64(axis)))
        return self.add("Unsqueeze", chosen, self.constant(ints(0)))

    def unary(self) -> None:
        op = str(self.random.choice(["Tanh", "Sigmoid", "Erf", "Relu", "HardSwish", "Neg", "Softplus"]))
        self.values.append(self.add(op, self.value()))

    def binary(self) -> None:
        op = str(self.random.choice(["Add", "Sub", "Mul", "Max", "Min"]))
        other = (
            self.value()
            if self.random.random() < 0.5
            else self.floats(*([4] if self.random.random() < 0.5 else []))
        )
        self.values.append(self.add(op, self.value(), other))

    def layer(self) -> None:
        x = self.add("MatMul", self.value(), self.floats(4, 4))
        self.values.append(self.add("LayerNormalization", x, self.floats(4), self.floats(4), axis=-1))

    def attention(self) -> None:
        x = self.value()
        scores = self.add("MatMul", x, self.add("Transpose", self.value(), perm=[0, 2, 1]))
        self.values.append(self.add("MatMul", self.add("Softmax", scores, axis=-1), x))

    def reshaped(self) -> None:
        x = self.value()
        tokens = self.size(x, 1)
        rows = self.add("Concat", self.size(x, 0), tokens, self.constant(ints(2, 2)), axis=0)
        heads = self.add("Transpose", self.add("Reshape", x, rows), perm=[0, 2, 1, 3])
        back = self.add("Concat", self.constant(ints(-1)), tokens, self.constant(ints(4)), axis=0)
        self.values.append(self.add("Reshape", self.add("Transpose", heads, perm=[0, 2, 1, 3]), back))

    def sliced(self) -> None:
        x = self.value()
        more = self.add("Concat", x, self.value(), axis=1)
        tokens, one = self.size(x, 1), self.constant(ints(1))
        last = self.add("Add", tokens, one)
        self.values.append(self.add("Slice", more, one, last, one))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_graph_is_exported_for_every_batch_and_length(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(seed)
    path, dims = tmp_path / "drawn.onnx", {"x": ["batch", "tokens", 4]}
    saved(path, drawn.nodes, {"x": X}, drawn.constants, [drawn.values[-1]], 17, dims)
    subject = from_onnx(path, (), 16, ())
    assert subject.compared_with == "ONNX Runtime"
    program = export(subject, 8)
    for batch, tokens in ((1, 16), (2, 3), (8, 5)):
        x = torch.tensor(normal(batch, tokens, 4))
        (expected,) = subject.expected({"x": x})
        (found,) = program.module()(x=x).values()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def linear(path: Path, **more: Any) -> Path:
    """Write a graph of one linear layer, and of other nodes if they are given."""
    nodes = more.pop("nodes", [helper.make_node("MatMul", ["input.1", "weight"], ["7"], "dense")])
    constants = {"weight": normal(4, 3)}
    outputs, dims = more.pop("outputs", ["7"]), more.pop("dims", ["n", 4])
    return saved(
        path, nodes, {"input.1": normal(2, 4)}, constants, outputs, more.pop("opset", 17), {"input.1": dims}
    )


@pytest.mark.process
def test_an_onnx_file_is_imported_and_compared_with_onnx_runtime(imported: Any) -> None:
    Path("encoder/onnx").mkdir(parents=True)
    path = linear(Path("encoder/onnx/model.onnx"))
    said = imported("encoder")
    assert "largest difference from ONNX Runtime" in said
    config = read_config(Path("models/encoder/config.pbtxt"))
    assert [given.name for given in (*config.input, *config.output)] == ["input.1", "7"]
    assert config.max_batch_size == 2
    sample = json.loads(Path("models/encoder/sample.json").read_text())
    assert sample["inputs"][0]["name"] == "input.1"
    said = imported(str(path), "--version", "2", "--input", "input.1:FP32:-1,4")
    assert "input.1" in said, "another version of the entry has the same names"


@pytest.mark.process
def test_a_fixed_batch_stays_fixed(imported: Any) -> None:
    linear(Path("fixed.onnx"), dims=[2, 4])
    imported("fixed.onnx")
    assert list(read_config(Path("models/fixed/config.pbtxt")).input[0].dims) == [2, 4]


def test_without_onnx_runtime_the_command_says_that_it_has_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    subject = from_onnx(linear(tmp_path / "a.onnx"), (), None, ())
    assert subject.compared_with == "eager PyTorch"
    assert any(
        "not compared with ONNX Runtime: the package onnxruntime is not installed" in n for n in subject.notes
    )


def test_outputs_without_a_row_for_each_row_are_left_out(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["input.1", "weight"], ["7"]),
        helper.make_node("Transpose", ["7"], ["turned"]),
        helper.make_node("MatMul", ["7", "turned"], ["pairs"]),
    ]
    path = linear(tmp_path / "a.onnx", nodes=nodes, outputs=["pairs", "7"])
    subject = from_onnx(path, (), None, ())
    assert [tuple(t.shape) for t in subject.answer(subject.examples(3, 0))] == [(3, 3)]
    assert subject.notes == ("not an output of the entry, because they have no row for each row: pairs",)
    with pytest.raises(ImportFailed, match="--outputs: pairs has no row for each row"):
        from_onnx(path, (), None, ("pairs",))


def test_an_8_bit_weight_stays_8_bits(tmp_path: Path) -> None:
    weight, scale = below(127, 64, 64, least=-127, dtype=np.int8), np.float32(0.01)
    nodes = [
        helper.make_node("DequantizeLinear", ["weight", "scale"], ["floats"]),
        helper.make_node("MatMul", ["x", "floats"], ["y"]),
    ]
    path = saved(tmp_path / "a.onnx", nodes, {"x": normal(2, 64)}, {"weight": weight, "scale": scale}, ["y"], 17)
    program = export(from_onnx(path, (), None, ()), 1)
    (stored,) = program.state_dict.values()
    assert (stored.dtype, tuple(stored.shape)) == (torch.int8, (64, 64))


NODE = helper.make_node
REFUSED = {
    "operator Loop (opset 17) of node again is not supported, because it is control flow": {
        "nodes": [NODE("Loop", ["input.1"], ["7"], "again")]
    },
    "operator NonZero (opset 17) of node 7 is not supported, because the sizes of its results depend on values": {
        "nodes": [NODE("NonZero", ["input.1"], ["7"])]
    },
    "operator other.Fancy (opset 1) of node f is not supported; nor are Det": {
        "nodes": [NODE("Fancy", ["input.1"], ["a"], "f", domain="other"), NODE("Det", ["a"], ["7"], "d")]
    },
    "a.onnx has opset 10; supported are 11 to 22": {"opset": 10},
    "a.onnx has opset 23; supported are 11 to 22": {"opset": 23},
    "operator MatMul (opset 17) of node m reads nowhere, which nothing before it computes": {
        "nodes": [NODE("MatMul", ["input.1", "nowhere"], ["7"], "m")]
    },
    "operator Reshape (opset 17) of node r: its shape depends on values of the inputs": {
        "nodes": [
            NODE("Cast", ["input.1"], ["n"], to=TensorProto.INT64),
            NODE("Reshape", ["weight", "n"], ["7"], "r"),
        ]
    },
    "operator LSTM (opset 17) of node l: clip is not supported": {
        "nodes": [NODE("LSTM", ["input.1", "weight", "weight"], ["7"], "l", clip=1.0)]
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_supported_is_named_with_its_node(reason: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailed) as refused:
        from_onnx(linear(tmp_path / "a.onnx", **REFUSED[reason]), (), None, ())
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def external(path: Path, location: str, nbytes: int = 48) -> Path:
    """Write a linear layer whose weight lies in another file."""
    model = onnx.load(linear(path))
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "8"), ("length", str(nbytes))):
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_in_another_file_of_the_folder_are_read_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    values = normal(4, 3)
    for folder in (tmp_path, tmp_path / "model"):
        (folder / "weights.bin").write_bytes(bytes(8) + values.tobytes())
    graph = read_graph(external(tmp_path / "model" / "a.onnx", "weights.bin"))
    np.testing.assert_array_equal(graph.constants["weight"].numpy(), values)
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "weights.bin")
    for location in ("../weights.bin", str(tmp_path / "weights.bin"), "link.bin"):
        with pytest.raises(ImportFailed, match="is not in the model's folder"):
            read_graph(external(tmp_path / "model" / "a.onnx", location))
    with pytest.raises(ImportFailed, match=r"its file 'gone.bin' is missing"):
        read_graph(external(tmp_path / "model" / "a.onnx", "gone.bin"))
    with pytest.raises(ImportFailed, match="is cut short: it has 56 bytes"):
        read_graph(external(tmp_path / "model" / "a.onnx", "weights.bin", 56))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    whole = linear(tmp_path / "a.onnx").read_bytes()
    for content in (whole[:-20], b"\xff" * 40, b""):
        (tmp_path / "b.onnx").write_bytes(content)
        with pytest.raises(ImportFailed, match=r"b.onnx"):
            from_onnx(tmp_path / "b.onnx", (), None, ())


def test_numbers_that_operators_compute_keep_the_graphs_shapes(tmp_path: Path) -> None:
    """Expand and Where of constants, as transformers' embeddings have them."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "two"], ["rows"]),
        helper.make_node("ConstantOfShape", ["two"], ["ones"], value=numpy_helper.from_array(ints(1))),
        helper.make_node("Neg", ["ones"], ["less"]),
        helper.make_node("Equal", ["rows", "less"], ["any"]),
        helper.make_node("Where", ["any", "ones", "rows"], ["wanted"]),
        helper.make_node("Expand", ["types", "wanted"], ["y"]),
    ]
    constants = {"zero": ints(0), "two": ints(2), "types": below(9, 1, 3)}
    path = saved(tmp_path / "a.onnx", nodes, {"x": X}, constants, ["y"], 17)
    require_same(path, {"x": X})


@pytest.mark.parametrize("width", [4, 5, 8])
def test_a_size_is_padded_to_a_multiple(width: int, tmp_path: Path) -> None:
    """As exporters write Swin's windows: `fmod` of Mod is an attribute with its default."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["width"]),
        helper.make_node("Mod", ["width", "four"], ["rest"], fmod=0),
        helper.make_node("Sub", ["four", "rest"], ["missing"]),
        helper.make_node("Mod", ["missing", "four"], ["more"], fmod=0),
        helper.make_node("ConstantOfShape", ["five"], ["zeros"], value=numpy_helper.from_array(ints(0))),
        helper.make_node("Concat", ["zeros", "more"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["y"]),
    ]
    constants = {"last": ints(-1), "four": ints(4), "five": ints(5)}
    x = normal(2, 3, width)
    path = saved(tmp_path / "a.onnx", nodes, {"x": x}, constants, ["y"], 16)
    require_same(path, {"x": x})
    module = OnnxModule(read_graph(path))
    exported = torch.export.export(module, (), {"x": torch.tensor(x)}).module()
    assert torch.equal(exported(x=torch.tensor(x))["y"], module(x=torch.tensor(x))["y"])

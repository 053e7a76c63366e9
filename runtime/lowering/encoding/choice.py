"""Chooses the codec of each weight, and measures what a lossy codec costs in accuracy.

A 16-bit codec that keeps every bit is always used. If fewer bytes are requested, outputs are compared with those of the
exact weights, and weights that change outputs too much stay exact.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import torch

from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.encoding.codec import Bytes, Codec, decoding, encode, exact_codec
from cohabit.runtime.lowering.encoding.int8_layers import by_row, compute_in_int8, copied
from cohabit.runtime.lowering.interaction import comparable, difference
from cohabit.runtime.lowering.model import FxModel, Port, table_of
from cohabit.runtime.lowering.weights import bytes_of

LEAST_NUMBERS: Final = 4096
"""Smaller weights (in numbers) are stored as they are: their copies are dominated by latency."""
LEAST_COSINE: Final = 0.999
"""Minimum cosine similarity of each output with lossy weights and with exact ones."""

aten = torch.ops.aten
Tensors = Mapping[str, torch.Tensor]
Run = Callable[[FxModel, Tensors], list[list[torch.Tensor]]]
"""Returns a model's outputs with these weights, for each of a few inputs."""


class OutputAccuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Comparison of an output with lossy weights and with exact ones."""

    name: str
    cosine: float | None
    """None for integers."""
    largest: float
    """Largest difference as a fraction of the largest element; for integers, the fraction that differs."""

    def __str__(self) -> str:
        cosine = "" if self.cosine is None else f"cosine {self.cosine:.5f}, "
        return f"{self.name}: {cosine}largest difference {self.largest:.1e}"


class Encoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the weights of a model are rounded, and the effect on outputs."""

    codec: Codec
    outputs: tuple[OutputAccuracy, ...] = ()
    kept: tuple[str, ...] = ()
    """Weights that stay exact, because outputs would fall below `LEAST_COSINE`."""
    unchecked: str | None = None
    """Why outputs were not compared."""


def exact_codecs(weights: Tensors) -> dict[str, Codec]:
    """Return the codecs of the weights that 16 bits represent exactly."""
    known: dict[int, Codec] = {}
    for tensor in weights.values():
        if id(tensor) not in known:
            known[id(tensor)] = exact_codec(bytes_of(tensor)) if _is_large(tensor) else "plain"
    return {name: known[id(tensor)] for name, tensor in weights.items() if known[id(tensor)] != "plain"}


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.numel() >= LEAST_NUMBERS


def encode_lossy(
    model: FxModel, weights: Tensors, asked: Codec, run: Run, unchecked: str | None, computing: Collection[str]
) -> tuple[dict[str, Codec], Encoding]:
    """Encode a model's tables and its layers that compute in int8, and return other weights' codecs and the accuracy.

    `run` returns the outputs with given weights and the model's tables; an empty list if outputs cannot be compared.
    `computing` has the weights whose layers are to compute in int8.
    """
    expected, tables = run(model, weights), dict(model.tables)
    model.tables = {name: _rounded_table(table, asked) for name, table in tables.items()}
    is_accurate = _least(_accuracies(model.outputs, run(model, weights), expected)) >= LEAST_COSINE
    model.tables = tables
    if is_accurate:
        encode_tables(model, lambda table: asked if _can_be(table, asked) else "plain")
    else:
        shorten_tables(model)
    codecs, outputs, exact = _lossy_codecs(model, weights, asked, run, expected, computing)
    compute_in_int8(model, [name for name in codecs if name in computing])
    kept = exact if is_accurate else (*tables, *exact)
    return codecs, Encoding(asked, outputs, kept, unchecked)


def _lossy_codecs(
    model: FxModel,
    weights: Tensors,
    asked: Codec,
    run: Run,
    expected: list[list[torch.Tensor]],
    computing: Collection[str],
) -> tuple[dict[str, Codec], tuple[OutputAccuracy, ...], tuple[str, ...]]:
    """Return the codecs of the weights that may be lossy, the outputs' accuracy, and the weights that stay exact.

    Vectors (biases, norms) and small weights are never lossy. If outputs fall below `LEAST_COSINE`, the weights that
    change them most alone stay exact: one, then two, four and so on.
    """
    lossy = {name: t for name, t in weights.items() if t.dim() > 1 and _is_large(t) and _can_be(t, asked)}

    def accuracy(names: Sequence[str]) -> tuple[OutputAccuracy, ...]:
        changed = {name: _round_trip(lossy[name], asked) for name in names if name not in computing}
        memory = [raw for _, raw in changed.values()]  # packed tensors do not own their bytes
        trial = copied(model)
        compute_in_int8(trial, [name for name in names if name in computing])
        found = run(trial, {**weights, **trial.weights, **{name: tensor for name, (tensor, _) in changed.items()}})
        del memory
        return _accuracies(model.outputs, found, expected)

    names, outputs = list(lossy), accuracy(list(lossy))
    if _least(outputs) < LEAST_COSINE:
        by_harm = sorted(names, key=lambda name: _least(accuracy([name])))
        kept = 1
        while _least(outputs) < LEAST_COSINE and kept < 2 * len(by_harm):
            names, outputs = by_harm[kept:], accuracy(by_harm[kept:])
            kept *= 2
    return dict.fromkeys(names, asked), outputs, tuple(name for name in lossy if name not in names)


def _can_be(tensor: torch.Tensor, codec: Codec) -> bool:
    """Whether a codec can represent all numbers of a float32 tensor.

    int8 has neither NaN nor infinities. In 16 bits, the largest numbers would become infinities.
    """
    dense = tensor if packing.is_packed(tensor) else tensor.contiguous()
    numbers = bytes_of(dense).view(np.float32)
    finite = numbers[np.isfinite(numbers)]
    if codec == "int8":
        return len(finite) == len(numbers)
    return not len(finite) or float(np.abs(finite).max()) <= torch.finfo(torch.bfloat16).max


def _round_trip(tensor: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, Bytes]:
    """Return a weight after encoding and decoding, and its bytes, which must outlive it."""
    raw = bytes_of(tensor)
    room = np.empty(raw.nbytes + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][: raw.nbytes]
    decoding(codec, encode(codec, raw), room)()
    if packing.is_packed(tensor):
        layout = packing.layout_of(tensor)
        return packing.packed_tensor(room.ctypes.data, tensor.dtype, tuple(tensor.shape), layout), room
    return torch.from_numpy(room).view(tensor.dtype).as_strided(tensor.shape, tensor.stride()), room


def _accuracies(
    ports: Sequence[Port], found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]
) -> tuple[OutputAccuracy, ...]:
    """Return the smallest cosine and the largest difference of each output."""
    accuracies = []
    for n, port in enumerate(ports):
        pairs = [(comparable(a[n]), comparable(b[n])) for a, b in zip(found, expected, strict=True)]
        largest = max((difference(own, other, other) for own, other in pairs), default=0.0)
        cosines = [cosine(own, other) for own, other in pairs if own.is_floating_point()]
        accuracies.append(OutputAccuracy(port.name, min(cosines, default=None), largest))
    return tuple(accuracies)


def cosine(own: torch.Tensor, other: torch.Tensor) -> float:
    """Return the cosine between two tensors' elements; 1 if both are zero."""
    lengths = float(own.norm() * other.norm())
    return float((own * other).sum()) / lengths if lengths else float(torch.equal(own, other))


def _least(outputs: Sequence[OutputAccuracy]) -> float:
    """Return the smallest cosine; -1 if any is NaN."""
    cosines = [output.cosine for output in outputs if output.cosine is not None]
    return -1.0 if any(map(math.isnan, cosines)) else min(cosines, default=1.0)


def shorten_tables(model: FxModel) -> None:
    """Store tables in 16 bits if these are exact. Rows are converted after they have been read."""
    encode_tables(model, lambda table: exact_codec(bytes_of(table.contiguous())))


def encode_tables(model: FxModel, choose: Callable[[torch.Tensor], Codec]) -> None:
    """Encode the host's embedding tables, in `int8` with a scale per row, and decode rows after they have been read.

    Tables that an op sums in the table's own type stay as they are. Encoded tables have a dot in their names, which
    names in exported programs never have.
    """
    readers: dict[str, list[torch.fx.Node]] = {}
    for node in model.graph.nodes:
        if (read := table_of(node.target, node.args)) is not None:
            readers.setdefault(read, []).append(node)
    for name, nodes in readers.items():
        table = model.tables[name]
        gathers = all(node.target is aten.embedding.default for node in nodes)
        codec: Codec = choose(table) if gathers and table.dtype is torch.float32 else "plain"
        if codec == "plain":
            continue
        before = sum(t.nbytes for t in model.tables.values())
        del model.tables[name]
        if codec == "int8":
            multiples, model.tables[f"{name}.scales"] = by_row(table)
            model.tables[f"{name}.{codec}"] = model.in_file(multiples)
        else:
            model.tables[f"{name}.{codec}"] = model.in_file(table.to(getattr(torch, codec)))
        model.saved_bytes += before - sum(t.nbytes for t in model.tables.values())
        for node in nodes:
            _decode_rows(model, node, name, codec)


def _rounded_table(table: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Return a table after encoding and decoding; unchanged if the codec cannot represent it."""
    if table.dtype is not torch.float32 or not _can_be(table, codec):
        return table
    if codec == "int8":
        multiples, scales = by_row(table)
        return multiples * scales
    return table.to(getattr(torch, codec)).float()


def _decode_rows(model: FxModel, node: torch.fx.Node, name: str, codec: Codec) -> None:
    call = model.graph.call_function
    with model.graph.inserting_before(node):
        rows = call(aten.embedding.default, (f"{name}.{codec}", *node.args[1:]), dict(node.kwargs))
        decoded = call(aten._to_copy.default, (rows,), {"dtype": torch.float32})
        if codec == "int8":
            scales = call(aten.embedding.default, (f"{name}.scales", *node.args[1:]), dict(node.kwargs))
            decoded = call(aten.mul.Tensor, (decoded, scales))
    decoded.meta = dict(node.meta)
    node.replace_all_uses_with(decoded)
    model.graph.erase_node(node)

"""An ONNX file, alone or in a folder with a tokenizer, becomes a module with known inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.declared_input import DeclaredInput, largest_size
from cohabit.server.importing.huggingface import text_parts, with_padding
from cohabit.server.importing.huggingface_inputs import MASK, TOKENS
from cohabit.server.importing.onnx.converted import OnnxModule
from cohabit.server.importing.onnx.reading import OnnxGraph, OnnxInput, read_graph
from cohabit.server.importing.subject import (
    ReferenceRuntime,
    Subject,
    datatype_of,
    declared,
    outputs_of_rows,
    reason_of,
)

_STATES = "last_hidden_state"
"""The output that `/v1/embeddings` pools."""
_SIZES = (512, 256, 128, 77, 64, 32, 16)
"""Largest sizes of dynamic dimensions, in the order tried: a table of positions limits them."""
_MASKS = ("mask", "token_type")
"""Parts of the names of inputs that are 0 or 1."""
_FOLLOWED = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that leave indices as they are."""


def from_onnx(path: Path, inputs: Sequence[DeclaredInput], most: int | None, outputs: Sequence[str]) -> Subject:
    """Convert a file. `inputs` set sizes of dynamic dimensions, `outputs` are those to keep. Raises ImportFailed."""
    graph = read_graph(path)
    if unknown := [name for name in outputs if name not in graph.outputs]:
        has = ", ".join(graph.outputs)
        raise ImportFailed(f"{path}: --outputs: the model has no output {unknown[0]}; it has {has}")
    # Outputs with a row for each row, and the inputs that they need.
    graph = graph.pruned(outputs or graph.outputs)
    subject = _subject(graph, inputs, most)
    rows, dropped = outputs_of_rows(path, subject, [graph.names[name] for name in outputs])
    kept = [name for name in graph.outputs if graph.names[name] in rows]
    left = [given.name for given in graph.inputs]
    graph = graph.pruned(kept)
    left = [name for name in left if name not in {given.name for given in graph.inputs}]
    if dropped or left:
        subject = _subject(graph, [given for given in inputs if given.name not in left], most)
    notes = list(subject.notes)
    if dropped:
        notes.append(f"not an output of the entry, because they have no row for each row: {', '.join(dropped)}")
    if left:
        notes.append(f"not an input of the entry, because no output needs it: {', '.join(left)}")
    if any(given.name == TOKENS for given in subject.inputs) and _STATES in kept:
        folder = path.parent.parent if path.parent.name == "onnx" else path.parent
        tokenizer, pooling, unlike = text_parts(folder, takes_tokens=True)
        subject, notes = replace(subject, tokenizer=tokenizer, pooling=pooling), [*notes, *unlike]
    names = {new: name for name, new in graph.names.items() if new != name}
    subject = replace(subject, names=names)
    reference = _onnxruntime(path, kept, subject)
    if isinstance(reference, str):
        return replace(subject, notes=(*notes, f"not compared with ONNX Runtime: {reference}"))
    return replace(subject, reference=reference, notes=tuple(notes))


def _subject(graph: OnnxGraph, asked: Sequence[DeclaredInput], most: int | None) -> Subject:
    """Convert a graph, with random examples of its inputs. Raises ImportFailed."""
    graph.require_supported()
    inputs, module = _inputs(graph, asked), OnnxModule(graph)
    tried = _SIZES if most is None and largest_size(inputs, most) else (largest_size(inputs, most),)
    for size in tried:
        subject = declared(module, inputs, size, has_declared_sizes=True)
        if any(given.name == MASK for given in inputs):
            subject = with_padding(subject)
        try:
            subject.answer(subject.examples(1, 1))  # at the largest size
            break
        except ImportFailed:
            if size == tried[-1]:
                raise
    if len(tried) > 1:
        note = f"dynamic dimensions have {size} elements at most; --max-sequence-length chooses otherwise"
        return replace(subject, notes=(*subject.notes, note))
    return subject


def _inputs(graph: OnnxGraph, asked: Sequence[DeclaredInput]) -> tuple[DeclaredInput, ...]:
    """Return the graph's inputs, with the sizes that the user has declared."""
    own, bounds = {given.name: given for given in graph.inputs}, _bounds(graph)
    chosen = {given.name: given for given in asked}
    if unknown := [name for name in chosen if name not in own]:
        raise ImportFailed(f"{graph.path}: --input: the model has no input {unknown[0]}; it has {', '.join(own)}")
    return tuple(
        replace(_input(graph, given, chosen.get(name)), name=graph.names[name], bound=bounds.get(name))
        for name, given in own.items()
    )


def _input(graph: OnnxGraph, own: OnnxInput, chosen: DeclaredInput | None) -> DeclaredInput:
    datatype, dims = datatype_of(own.dtype), tuple(-1 if dim is None else dim for dim in own.dims)
    if chosen is None:
        return DeclaredInput(own.name, datatype, dims)
    fits = len(chosen.dims) == len(dims) and all(d in (-1, c) for d, c in zip(dims, chosen.dims, strict=True))
    if chosen.datatype != datatype or not fits:
        shape = ",".join(map(str, dims))
        raise ImportFailed(
            f"{graph.path}: --input: {own.name} is {own.name}:{datatype}:{shape}, where a number may take the place of"
            " a -1"
        )
    return chosen


def _bounds(graph: OnnxGraph) -> Mapping[str, int]:
    """Return exclusive upper bounds of integer inputs: the rows of the tables that they index, and 2 for masks."""
    source = {given.name: given.name for given in graph.inputs}
    bounds = {name: 2 for name in source if any(part in name for part in _MASKS)}
    for node in graph.nodes:
        if node.op in _FOLLOWED and node.inputs[0] in source:
            source[node.outputs[0]] = source[node.inputs[0]]
        if node.op == "Gather" and node.inputs[0] in graph.constants and node.inputs[1] in source:
            name, rows = (
                source[node.inputs[1]],
                graph.constants[node.inputs[0]].shape[node.attributes.get("axis", 0)],
            )
            bounds[name] = min(rows, bounds.get(name, rows))
    return bounds


def _onnxruntime(path: Path, outputs: Sequence[str], subject: Subject) -> ReferenceRuntime | str:
    """Return the model in ONNX Runtime, or why it does not answer there."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed; pip install onnxruntime"
    try:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        # Fused operators of 8-bit models round otherwise than the graph says.
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])

        def answer(inputs: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
            given = {subject.names.get(name, name): tensor.numpy() for name, tensor in inputs.items()}
            return [torch.as_tensor(array) for array in session.run(list(outputs), given)]

        answer(subject.examples(2, 0))
    except Exception as error:  # its own, of many classes
        return reason_of(error)
    return ReferenceRuntime("ONNX Runtime", answer)

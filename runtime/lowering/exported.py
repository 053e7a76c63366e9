"""Converts an exported program to the form in which it is lowered."""

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from runtime.errors import UnsupportedModel
from runtime.lowering.model import FxModel, Port


def from_program(name: str, program: ExportedProgram) -> FxModel:
    """Convert an exported program. Raises UnsupportedModel for state, tokens and other shapes than the batch."""
    signature = program.graph_signature
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weights: dict[str, torch.Tensor] = {}
    inputs: list[fx.Node] = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        match spec.kind:
            case InputKind.USER_INPUT:
                if isinstance(spec.arg, TensorArgument):
                    inputs.append(node)
                elif isinstance(spec.arg, ConstantArgument):
                    node.replace_all_uses_with(spec.arg.value)
                    graph.erase_node(node)
                else:
                    raise UnsupportedModel(f"{name}: input {node.name} is not a tensor; pass it as one")
            case InputKind.PARAMETER | InputKind.BUFFER | InputKind.CONSTANT_TENSOR:
                weights[node.name] = _weight(program, str(spec.target))
            case _:
                raise UnsupportedModel(
                    f"{name}: input {node.name} is a {spec.kind.name.lower()}; only tensors work"
                )
    _refuse_state(name, program)
    batch = _batch_symbol(name, inputs)
    if not inputs:
        raise UnsupportedModel(f"{name}: the program takes no tensors")
    names = _input_names(program)
    return FxModel(
        name=name,
        root=program.graph_module,
        graph=graph,
        weights=weights,
        inputs=tuple(_port(name, names.get(node.name, node.name), node, batch) for node in inputs),
        outputs=_outputs(name, program, graph, batch),
        max_batch=None if batch is None else _largest(program, batch),
    )


def _weight(program: ExportedProgram, target: str) -> torch.Tensor:
    value = program.state_dict.get(target, program.constants.get(target))
    if not isinstance(value, torch.Tensor):
        raise UnsupportedModel(f"weight {target} is missing from the archive or is not a tensor")
    return value.detach()


def _refuse_state(name: str, program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise UnsupportedModel(
                f"{name}: the program changes {spec.target} from call to call ({spec.kind.name.lower()});"
                " a served model has no state, so return it as an output instead"
            )


def _batch_symbol(name: str, inputs: list[fx.Node]) -> str | None:
    """The symbol that is the first dimension of every input, or None if nothing is dynamic."""
    symbols = {str(d) for node in inputs for d in node.meta["val"].shape if not _is_static(d)}
    if not symbols:
        return None
    first = {str(node.meta["val"].shape[0]) if node.meta["val"].dim() else "" for node in inputs}
    if len(symbols) > 1 or first != symbols:
        dims = {node.name: [str(d) for d in node.meta["val"].shape] for node in inputs}
        raise UnsupportedModel(
            f"{name}: dynamic dimensions {dims}; only a first dimension that all inputs share can be"
            " dynamic (the batch). Export the others at a fixed size and pad to it"
        )
    return symbols.pop()


def _is_static(dim: Any) -> bool:
    return isinstance(dim, int) or bool(dim.node.expr.is_number)


def _port(model: str, name: str, node: fx.Node, batch: str | None) -> Port:
    value = node.meta["val"]
    dims: list[int | None] = []
    for position, dim in enumerate(value.shape):
        if _is_static(dim):
            dims.append(int(dim))
        elif position == 0 and str(dim) == batch:
            dims.append(None)
        else:
            raise UnsupportedModel(
                f"{model}: {name} has dimension {position} of size {dim}; sizes can depend on the batch in the"
                " first dimension only, and never on values"
            )
    if batch is not None and (not dims or dims[0] is not None):
        raise UnsupportedModel(
            f"{model}: {name} has shape {dims} without the batch in front; export the model at a fixed batch"
        )
    return Port(name, value.dtype, tuple(dims))


def _largest(program: ExportedProgram, batch: str) -> int:
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) == batch and bounds.upper.is_number and bounds.upper < 1 << 20:
            return int(bounds.upper)
    return 1 << 20


def _outputs(name: str, program: ExportedProgram, graph: fx.Graph, batch: str | None) -> tuple[Port, ...]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    values = list(pytree.tree_leaves(output.args[0]))
    specs = program.graph_signature.output_specs
    kept = [v for v, s in zip(values, specs, strict=True) if s.kind is OutputKind.USER_OUTPUT]
    names = _output_names(program, len(kept))
    tensors = [(n, v) for n, v in zip(names, kept, strict=True) if isinstance(v, fx.Node)]
    if not tensors or any(not isinstance(v.meta.get("val"), torch.Tensor) for _, v in tensors):
        raise UnsupportedModel(f"{name}: outputs {names} are not all tensors; return tensors only")
    output.args = (tuple(v for _, v in tensors),)
    return tuple(_port(name, n, v, batch) for n, v in tensors)


def _output_names(program: ExportedProgram, count: int) -> list[str]:
    """Names from the output structure: dictionary keys, `output` for a lone tensor, else `output_0`, ..."""
    spec = program.call_spec.out_spec
    if spec is None:
        return [f"output_{i}" for i in range(count)]
    names = ["_".join(path) for path in _paths(spec)]
    return [name if name and not name[0].isdigit() else f"output_{name}".rstrip("_") for name in names]


def _input_names(program: ExportedProgram) -> dict[str, str]:
    """The names that the model itself has for its arguments, by those that torch gives them, in lower case.

    Empty where the archive does not say them, or has one twice.
    """
    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    if signature is None or not signature.forward_arg_names:
        return {}
    user_inputs = [s.arg for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    arguments, paths, names = signature.forward_arg_names, _paths(signature.in_spec), []
    if min(map(len, paths), default=0) < 2:  # positional or by name, then which
        return {}
    for kind, argument, *rest in paths:
        positional = kind == "0" and argument.isdigit() and int(argument) < len(arguments)
        names.append("_".join([arguments[int(argument)] if positional else argument, *rest]))
    if len(set(names)) != len(names) or len(names) != len(user_inputs) or not all(map(str.isprintable, names)):
        return {}
    return {arg.name: name for arg, name in zip(user_inputs, names, strict=True)}


def _paths(spec: pytree.TreeSpec) -> list[list[str]]:
    """The keys and indices that lead to each leaf of a structure."""
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    return [
        [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        for path, _ in leaves
    ]

"""Converts an exported program to the form that lowering works on."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from cohabit.planner.shapes import Dimension, DynamicShape, UnknownExpression, evaluate
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.model import FxModel, Port
from cohabit.runtime.lowering.rewrites.functional import functional
from cohabit.runtime.lowering.trace import DYNAMIC, is_unbacked

_UNLIMITED = 1 << 20
_TRIED = 5040
"""Value tried for every symbol: no quotient that occurs is zero for it."""
_INPUT_SIZE = re.compile(r"L((?:\['[^']+'\]|\[\d+\])+)\.size\(\)\[(\d+)\]", re.ASCII)
"""Size of an input's dimension as guards name it: `L['x'].size()[1]`."""
_KEY = re.compile(r"\['?([^'\]]+)'?\]")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def from_program(name: str, program: ExportedProgram, guards: Sequence[str] = ()) -> FxModel:
    """Convert an exported program; `guards` are the conditions on its inputs' sizes that the archive stores separately.

    Raises UnsupportedModel for state, tokens, and sizes that depend on values.
    """
    _refuse_training(name, program)
    exported = program
    graph, program = functional(name, exported)
    signature = program.graph_signature
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    weights: dict[str, torch.Tensor] = {}
    inputs: dict[fx.Node, str] = {}
    names = _input_names(program)
    # Sort placeholders into inputs and weights; constant inputs become literals.
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        match spec.kind:
            case InputKind.USER_INPUT:
                if isinstance(spec.arg, TensorArgument):
                    # The copied node has another name if the program's is that of a function, such as `input`.
                    inputs[node] = names.get(spec.arg.name, spec.arg.name)
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
    if not inputs:
        raise UnsupportedModel(f"{name}: the program takes no tensors")
    nodes = list(inputs)
    # The batch is optional; other symbols must follow from the inputs' sizes.
    batch = _batch_symbol(nodes)
    dimensions = tuple(_dimensions(name, program, nodes, batch))
    symbols = {d.symbol for d in dimensions}
    return FxModel(
        name=name,
        root=program.graph_module,
        graph=graph,
        weights=weights,
        inputs=tuple(_port(name, own, node, batch, symbols) for node, own in inputs.items()),
        outputs=_outputs(name, program, graph, batch, symbols),
        max_batch=None if batch is None else _range(program, batch)[1] or _UNLIMITED,
        batch_symbol=batch,
        dynamic=DynamicShape(
            dimensions,
            _constraints(name, exported, guards, {own: node for node, own in inputs.items()}, symbols, batch)
            if symbols
            else (),
        ),
        changed_inputs=_changed_inputs(program, names),
    )


def _weight(program: ExportedProgram, target: str) -> torch.Tensor:
    value = program.state_dict.get(target, program.constants.get(target))
    if not isinstance(value, torch.Tensor):
        raise UnsupportedModel(f"weight {target} is missing from the archive or is not a tensor")
    return value.detach()


def _refuse_training(name: str, program: ExportedProgram) -> None:
    """Raise UnsupportedModel for batch norms in training mode, which use batch statistics and update their own."""
    norm = torch.ops.aten.batch_norm.default
    norms = [node.name for node in program.graph.nodes if node.target is norm and node.args[5] is True]
    buffers = set(program.graph_signature.inputs_to_buffers.values())
    if norms and any(target.rpartition(".")[2] == "running_mean" for target in buffers):
        raise UnsupportedModel(
            f"{name}: it was exported in training mode: {norms[0]} takes the mean of each batch and changes its running"
            " mean; call .eval() of the module before torch.export.export"
        )


def _refuse_state(name: str, program: ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise UnsupportedModel(
                f"{name}: the program changes {spec.target} from call to call ({spec.kind.name.lower()});"
                " a served model has no state, so return it as an output instead"
            )


def _changed_inputs(program: ExportedProgram, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the inputs that the original program changes in place, given its functional form."""
    changed = [s.target for s in program.graph_signature.output_specs if s.kind is OutputKind.USER_INPUT_MUTATION]
    return tuple(names.get(target, target) for target in changed if target is not None)


def _batch_symbol(inputs: list[fx.Node]) -> str | None:
    """Return the symbol that is the first dimension of every input; None if there is none."""
    first = [node.meta["val"].shape[0] if node.meta["val"].dim() else 0 for node in inputs]
    is_symbol = all(isinstance(dim, torch.SymInt) and dim.node.expr.is_Symbol for dim in first)
    return str(first[0]) if is_symbol and len(set(map(str, first))) == 1 else None


def _symbols(dim: Any) -> set[str]:
    """Return the symbols in a size; none for a static one."""
    return set() if isinstance(dim, int) else {str(s) for s in dim.node.expr.free_symbols}


def _dimensions(
    name: str, program: ExportedProgram, inputs: list[fx.Node], batch: str | None
) -> Iterator[Dimension]:
    """Yield the other dynamic dimensions: for each symbol, the first input dimension equal to it.

    Without one, a dimension that is a multiple of the symbol plus a constant.
    """
    found = [
        (dim.node.expr, index, axis)
        for index, node in enumerate(inputs)
        for axis, dim in enumerate(node.meta["val"].shape)
        if _symbols(dim) and str(dim) != batch
    ]
    known: set[str] = set()
    for expression, index, axis in sorted(found, key=lambda f: not f[0].is_Symbol):
        for symbol in expression.free_symbols:
            if str(symbol) in known:
                continue
            step = expression.diff(symbol)
            if len(expression.free_symbols) > 1 or not step.is_Integer or step < 1:
                raise UnsupportedModel(
                    f"{name}: dimension {axis} of input {inputs[index].name} has the size {expression}, and no"
                    f" input has {symbol} itself; export it so that every dynamic size is a size of an input"
                )
            offset = int(expression.subs(symbol, 0))
            least, most = _range(program, str(symbol))
            size = None if most is None else most * int(step) + offset
            known.add(str(symbol))
            yield Dimension(str(symbol), index, axis, int(step), offset, max(1, least * int(step) + offset), size)


def _range(program: ExportedProgram, symbol: str) -> tuple[int, int | None]:
    """Return the smallest and the largest value of a symbol; None for no limit."""
    for known, bounds in program.range_constraints.items():
        if str(known) == symbol:
            limited = bounds.upper.is_number and bounds.upper < _UNLIMITED
            return int(bounds.lower), int(bounds.upper) if limited else None
    return 1, None


def _constraints(
    name: str,
    program: ExportedProgram,
    guards: Sequence[str],
    inputs: dict[str, fx.Node],
    symbols: set[str],
    batch: str | None,
) -> tuple[str, ...]:
    """Return export's conditions on dynamic dimensions: assertions in the program, and guards stored separately."""
    found = [str(value) for node in program.graph.nodes if (value := _asserted(node)) is not None]
    found += [_INPUT_SIZE.sub(lambda match: _size_of(inputs, match), guard) for guard in guards]
    kept: dict[str, None] = {}
    for condition in found:
        unclear = ".size()" in condition
        if unclear or not symbols.isdisjoint(_NAME.findall(condition)):
            if unclear or not _is_known(condition, {*symbols, batch}):
                raise UnsupportedModel(
                    f"{name}: it was exported under the condition {condition[:200]}, which cannot be checked"
                )
            kept[condition] = None
    return tuple(kept)


def _asserted(node: fx.Node) -> torch.SymBool | None:
    """Return the condition on symbols that a node asserts; None for any other node."""
    if getattr(node.target, "_opname", "") != "_assert_scalar" or not isinstance(node.args[0], fx.Node):
        return None
    value = node.args[0].meta.get("val")
    return value if isinstance(value, torch.SymBool) and not is_unbacked(value) else None


def _size_of(inputs: dict[str, fx.Node], match: re.Match[str]) -> str:
    """Return the expression for an input size that a guard names."""
    node = inputs.get("_".join(_KEY.findall(match[1])))
    return match[0] if node is None else f"({node.meta['val'].shape[int(match[2])]})"


def _port(model: str, name: str, node: fx.Node, batch: str | None, symbols: set[str]) -> Port:
    value = node.meta["val"]
    dims: list[int | str | None] = []
    for position, dim in enumerate(value.shape):
        if not _symbols(dim):
            dims.append(int(dim))
        elif position == 0 and batch is not None and _is_symbol(dim, batch):
            dims.append(None)
        elif _symbols(dim) <= symbols and _is_known(str(dim), symbols):
            dims.append(str(dim))
        else:
            if is_unbacked(dim):
                raise UnsupportedModel(
                    f"{model}: {name} has as many elements in dimension {position} as values decide, as y[y > 0] has;"
                    " sizes may depend on the inputs' sizes only: return a fixed number (topk), or all and a mask"
                )
            raise UnsupportedModel(
                f"{model}: {name} has dimension {position} of size {dim}; sizes can depend on the batch in the"
                " first dimension only"
            )
    if batch is not None and (not dims or dims[0] is not None):
        raise UnsupportedModel(
            f"{model}: {name} has shape {dims} without the batch in front; export the model at a fixed batch"
        )
    return Port(name, value.dtype, tuple(dims))


def _is_symbol(dim: Any, symbol: str) -> bool:
    """Whether a size equals a symbol for all values, also as a quotient: `(L * B + L - 1) // L` is B."""
    expression = dim.node.expr
    own = next((s for s in expression.free_symbols if str(s) == symbol), None)
    if own is None or expression == own or not isinstance(expression, FloorDiv):
        return bool(expression == own)
    total, parts = expression.args
    rest = (total - own * parts).expand()
    return bool(rest.is_nonnegative and (parts - 1 - rest).is_nonnegative)


def _is_known(expression: str, symbols: Iterable[str | None]) -> bool:
    """Whether the server can evaluate an expression."""
    try:
        evaluate(expression, {s: _TRIED for s in symbols if s is not None})
    except (UnknownExpression, ArithmeticError):
        return False
    return True


def compute_sizes_first(model: FxModel) -> None:
    """Compute every size that depends on a dynamic dimension from the inputs' sizes, once, before the first op.

    Reading a size from an activation later would keep that activation in memory until then. Raises UnsupportedModel.
    """
    if not model.dynamic.dimensions:
        return
    graph, inputs = model.graph, model.input_nodes
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    dynamic = {d.symbol for d in model.dynamic.dimensions}
    nodes = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)]
    computed: dict[Any, fx.Node] = {}
    with graph.inserting_before(first):
        leaves = _symbol_proxies(model, inputs)
        for node in nodes:
            expression = node.meta["val"].node.expr
            used = _symbols(node.meta["val"])
            if not used & dynamic or not used <= leaves.keys():
                continue
            if expression not in computed:
                own = {s: leaves[str(s)] for s in expression.free_symbols}
                try:
                    computed[expression] = sympy_interp(PythonReferenceAnalysis, own, expression).node
                except (KeyError, TypeError, AttributeError, NotImplementedError) as error:
                    raise UnsupportedModel(
                        f"{model.name}: {node.name} computes a size as {str(expression)[:80]}, which is not supported"
                    ) from error
            node.replace_all_uses_with(computed[expression])
    graph.eliminate_dead_code()


def _symbol_proxies(model: FxModel, inputs: list[fx.Node]) -> dict[str, fx.Proxy]:
    """Add nodes that read the symbols' values from the inputs' sizes. Returns their proxies by symbol."""
    tracer = fx.proxy.GraphAppendingTracer(model.graph)

    def size(index: int, axis: int) -> fx.Node:
        return model.graph.call_function(torch.ops.aten.sym_size.int, (inputs[index], axis))

    proxies: dict[str, fx.Proxy] = {}
    if model.batch_symbol is not None:
        proxies[model.batch_symbol] = fx.Proxy(size(0, 0), tracer)
    for d in model.dynamic.dimensions:
        node = size(d.input, d.axis)
        node.meta[DYNAMIC] = True
        value: Any = fx.Proxy(node, tracer)
        proxies[d.symbol] = value if (d.step, d.offset) == (1, 0) else (value - d.offset) // d.step
    return proxies


def _outputs(
    name: str, program: ExportedProgram, graph: fx.Graph, batch: str | None, symbols: set[str]
) -> tuple[Port, ...]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    values = list(pytree.tree_leaves(output.args[0]))
    specs = program.graph_signature.output_specs
    kept = [v for v, s in zip(values, specs, strict=True) if s.kind is OutputKind.USER_OUTPUT]
    names = _output_names(program, len(kept))
    tensors = [(n, v) for n, v in zip(names, kept, strict=True) if isinstance(v, fx.Node)]
    if not tensors or any(not isinstance(v.meta.get("val"), torch.Tensor) for _, v in tensors):
        raise UnsupportedModel(f"{name}: outputs {names} are not all tensors; return tensors only")
    if twice := [n for n, count in Counter(n for n, _ in tensors).items() if count > 1]:
        raise UnsupportedModel(
            f"{name}: several outputs are called {twice[0]}; rename keys of what forward returns"
        )
    output.args = (tuple(v for _, v in tensors),)
    return tuple(_port(name, n, v, batch, symbols) for n, v in tensors)


def _output_names(program: ExportedProgram, count: int) -> list[str]:
    """Return names from the output structure: dictionary keys, `output` for a lone tensor, else `output_0`, ..."""
    spec = program.call_spec.out_spec
    if spec is None:
        return [f"output_{i}" for i in range(count)]
    names = ["_".join(path) for path in _paths(spec)]
    return [name if name and not name[0].isdigit() else f"output_{name}".rstrip("_") for name in names]


def _input_names(program: ExportedProgram) -> dict[str, str]:
    """Return the model's own argument names, by torch's (lower-case) names.

    Empty if the archive lacks them or has one twice.
    """
    signature = program.module_call_graph[0].signature if program.module_call_graph else None
    if signature is None or not signature.forward_arg_names:
        return {}
    user_inputs = [s.arg for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    arguments, paths, names = signature.forward_arg_names, _paths(signature.in_spec), []
    if min(map(len, paths), default=0) < 2:  # path: positional or keyword, then the argument
        return {}
    for kind, argument, *rest in paths:
        positional = kind == "0" and argument.isdigit() and int(argument) < len(arguments)
        names.append("_".join([arguments[int(argument)] if positional else argument, *rest]))
    if len(set(names)) != len(names) or len(names) != len(user_inputs) or not all(map(str.isprintable, names)):
        return {}
    return {arg.name: name for arg, name in zip(user_inputs, names, strict=True)}


def _paths(spec: pytree.TreeSpec) -> list[list[str]]:
    """Return the keys and indices that lead to each leaf of a structure."""
    leaves, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    return [
        [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        for path, _ in leaves
    ]

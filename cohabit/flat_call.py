"""Calls of a module as tensors by name: their structure, and inputs and outputs other than tensors, are constants."""

import enum
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from cohabit.runtime.errors import UnsupportedModel
from cohabit.server.importing.subject import Tensors, with_signature

_CONSTANTS = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
)
"""Types of constants: they are compared by value."""
_RULE = (
    "alone or in tuples, lists, dictionaries and named tuples, or in a class registered with torch.utils._pytree"
)


class FlatCall:
    """The form of a module's calls, taken from an example: which inputs are tensors, and the values of the others.

    `module` takes the tensors by name, and returns the tensors among the outputs in order. After a call of it,
    `unflatten` returns outputs in that call's structure, with its other values.
    """

    def __init__(self, module: nn.Module, in_order: Sequence[Any], by_name: Mapping[str, Any]) -> None:
        """Raises UnsupportedModel for an input that is neither a tensor nor a constant, and for a scripted module."""
        self._title = type(module).__name__
        if isinstance(module, torch.jit.RecursiveScriptModule):
            raise UnsupportedModel(
                f"{self._title}: programs of torch.jit.script cannot be exported; pass the module that was scripted"
            )
        self._inputs, self._spec = _leaves((tuple(in_order), dict(by_name)))
        self._names = dict(zip(self._inputs, _names(module, self._inputs), strict=True))
        self._outputs: dict[pytree.KeyPath, Any] = {}
        self._out_spec: pytree.TreeSpec | None = None
        for path, value in self._inputs.items():
            _require_usable(f"{self._title}: input {self._names[path]}", value)
        # Copies: torch.export takes a tensor that is given twice for one input.
        self.example: Final = {n: tensor.detach().clone() for n, tensor in self._tensors_of(self._inputs).items()}
        if not self.example:
            raise UnsupportedModel(f"{self._title}: its example has no tensor; pass one at least")
        self.module: Final = _Flat(module, self._call, list(self.example))

    def tensors(self, in_order: Sequence[Any], by_name: Mapping[str, Any]) -> Tensors:
        """Return the tensors of a call by name.

        Raises TypeError for another structure than the example's, and ValueError for another shape, dtype or constant.
        """
        given, _ = _leaves((tuple(in_order), dict(by_name)))
        if given.keys() != self._inputs.keys():
            own_order, own_names = pytree.tree_unflatten(range(len(self._inputs)), self._spec)
            raise TypeError(
                f"called with {len(in_order)} inputs in order and {sorted(by_name)} by name; the example had"
                f" {len(own_order)} in order and {sorted(own_names)} by name{_apart(given, self._inputs)}"
            )
        for path, own in self._inputs.items():
            _require_same(self._names[path], given[path], own)
        return self._tensors_of(given)

    def unflatten(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return outputs in the module's structure: these tensors, and the other values of the last call."""
        assert self._out_spec is not None
        given = iter(tensors)
        leaves = [next(given) if value is _TENSOR else value for value in self._outputs.values()]
        return pytree.tree_unflatten(leaves, self._out_spec)

    def output_name(self, index: int) -> str:
        """Return how the module's caller reaches a tensor of the outputs: `output['scores'][0]`."""
        paths = [path for path, value in self._outputs.items() if value is _TENSOR]
        return f"output{pytree.keystr(paths[index])}"

    def _tensors_of(self, leaves: Mapping[pytree.KeyPath, Any]) -> Tensors:
        return {self._names[p]: leaves[p] for p, own in self._inputs.items() if isinstance(own, torch.Tensor)}

    def _call(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = [tensors.get(self._names[path], value) for path, value in self._inputs.items()]
        in_order, by_name = pytree.tree_unflatten(leaves, self._spec)
        outputs, self._out_spec = _leaves(module(*in_order, **by_name))
        found = [value for value in outputs.values() if isinstance(value, torch.Tensor)]
        for path, value in outputs.items():
            _require_usable(f"{self._title}: output{pytree.keystr(path)}", value)
        if not found:
            raise UnsupportedModel(f"{self._title}: it returns no tensor; return tensors, {_RULE}")
        # The tensors of a trace must not outlive it.
        self._outputs = {path: _TENSOR if isinstance(v, torch.Tensor) else v for path, v in outputs.items()}
        return found


_TENSOR: Final = object()
"""Place of a tensor among outputs."""


class _Flat(nn.Module):
    """Has another module's parameters, and takes tensors by name."""

    def __init__(self, module: nn.Module, call: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.forward = with_signature(partial(_call_flat, call, module), names)


def _call_flat(call: Any, module: nn.Module, **tensors: torch.Tensor) -> Any:
    return call(module, tensors)


def _leaves(tree: Any) -> tuple[dict[pytree.KeyPath, Any], pytree.TreeSpec]:
    # torch takes a size apart, and would return it as a tuple.
    leaves, spec = pytree.tree_flatten_with_path(tree, is_leaf=lambda value: isinstance(value, torch.Size))
    return dict(leaves), spec


def _names(module: nn.Module, paths: Iterable[pytree.KeyPath]) -> list[str]:
    """Return a unique identifier for each input: its argument's name, and the keys that lead to it in the argument."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except ValueError:  # a forward in C
        parameters = []
    in_order = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names: list[str] = []
    for kind, argument, *rest in paths:
        first = _key(argument)
        if _key(kind) == 0:  # in order; more than there are arguments go to `*args`
            first = in_order[first] if first < len(in_order) else f"args_{first - len(in_order)}"
        name = re.sub(r"\W", "_", "_".join(map(str, [first, *map(_key, rest)])), flags=re.ASCII)
        while name in names:
            name += "_"
        names.append(name)
    return names


def _key(key: Any) -> Any:
    """Return the index, key or attribute of a step of a path."""
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


def _require_usable(name: str, value: Any) -> None:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise UnsupportedModel(f"{name} is a number that is read from a tensor (.item()); return the tensor")
    if isinstance(value, torch.Tensor):
        if (kind := _other_kind(value)) is not None:
            raise UnsupportedModel(f"{name} is a {kind} tensor; only dense ones work")
        return
    if not isinstance(value, _CONSTANTS):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise UnsupportedModel(f"{name} is a {kind}; use tensors, numbers, text and None, {_RULE}")


def _other_kind(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is if it is not dense, with elements of its own."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "meta"
    return None if tensor.layout is torch.strided else str(tensor.layout)


def _is_same_constant(value: Any, own: Any) -> bool:
    if type(value) is not type(own):
        return False
    # As text, 0.0 differs from -0.0, and NaN does not differ from itself.
    return repr(value) == repr(own) if isinstance(value, float | complex) else bool(value == own)


def _require_same(name: str, value: Any, own: Any) -> None:
    """Raise ValueError if an input is not of the example's form, or not its constant."""
    if isinstance(own, torch.Tensor):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is {value!r:.40}; the example was a tensor")
        if (kind := _other_kind(value)) is not None:
            raise ValueError(f"{name} is a {kind} tensor; only dense ones work")
        if (value.shape, value.dtype) != (own.shape, own.dtype):
            raise ValueError(
                f"{name} is {value.dtype} {list(value.shape)}; the example was {own.dtype} {list(own.shape)}"
            )
    elif not _is_same_constant(value, own):
        found = "a tensor" if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        raise ValueError(
            f"{name} is {found}; the example was {own!r:.40}, which is a constant of the program: load the module again"
            " with another example, or let it take a tensor"
        )


def _apart(given: Mapping[pytree.KeyPath, Any], own: Mapping[pytree.KeyPath, Any]) -> str:
    """Return which inputs only one of two calls has, as text."""
    more, fewer = ([pytree.keystr(p[1:]) for p in a if p not in b] for a, b in ((given, own), (own, given)))
    texts = [f"{word} {', '.join(found)}" for word, found in (("more:", more), ("missing:", fewer)) if found]
    return f" ({'; '.join(texts)})" if texts else ""

"""A module to import, with its inputs and example values."""

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from cohabit.server.engine.servable import DATATYPES
from cohabit.server.errors import ImportFailed
from cohabit.server.importing.declared_input import DeclaredInput
from cohabit.server.ipc.model import LanguageDocument

Tensors = dict[str, torch.Tensor]
Examples = Callable[[int, int], Tensors]
"""Makes inputs by name from a number of rows and a seed. With a fixed batch, ignores the number of rows."""

_BOUNDS = (1000, 100, 10, 2, 1)
"""Bounds of random integers, in the order tried: a model's indices must be valid."""
_MOST_REASON = 300
_TRIED_ROWS = (2, 3)
_ADVICE = re.compile(r"For more information, run with TORCH_LOGS=\S+")


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """One decoding step of a causal language model: its states, their sizes, and how texts end."""

    states: tuple[tuple[str, str], ...]
    """Growing inputs, each with the output that extends it."""
    lengths: str
    """The input that gets the length of the states."""
    ranges: Mapping[str, Mapping[int, tuple[int, int]]]
    """Minimum and maximum size of each input's dynamic dimensions other than the batch."""
    shape_buckets: str
    document: LanguageDocument


@dataclass(frozen=True, slots=True)
class ReferenceRuntime:
    """What a program is compared with, if that is not the module itself."""

    name: str
    answer: Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]]
    """Returns the outputs in order."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A module in eval mode that takes its inputs by name and returns tensors."""

    module: nn.Module
    inputs: tuple[DeclaredInput, ...]
    examples: Examples
    most_tokens: int = 0
    """Maximum dynamic sequence length, or size of the other dynamic dimensions; 0 without any."""
    has_declared_sizes: bool = False
    """Whether the user has declared the dynamic dimensions, which may then differ in size."""
    classes: tuple[str, ...] = ()
    """Names of the classes of the output `logits`."""
    images: tuple[str, ...] = ()
    """Image inputs, channels first."""
    tokenizer: bytes | None = None
    """The contents of a text model's `tokenizer.json`."""
    pooling: str | None = None
    """Pooling of token states into embeddings, a value of config.pbtxt's parameter `pooling`."""
    notes: tuple[str, ...] = ()
    """Notes about the entry for the user."""
    decoding: DecodingStep | None = None
    """Set if the module is one decoding step of a causal language model."""
    reference: ReferenceRuntime | None = None
    """Set if answers are compared with something other than the module's."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names for clients of inputs and outputs that the module has to call otherwise, by the module's names."""

    @property
    def compared_with(self) -> str:
        return "eager PyTorch" if self.reference is None else self.reference.name

    def expected(self, inputs: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the outputs that the program's are compared with, in order."""
        return self.answer(inputs) if self.reference is None else self.reference.answer(inputs)

    def answer(self, inputs: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the module's own outputs in order."""
        with torch.no_grad():
            outputs = self.module(**inputs)
        return [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]

    def float64_answer(self, inputs: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Return the outputs of a copy of the module in float64; None if that fails."""
        wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        try:
            return replace(self, module=copy.deepcopy(self.module).double()).answer(wide)
        except Exception:  # it may make tensors of a fixed type, or be impossible to copy
            return None


class ByPosition(nn.Module):
    """A module that takes named inputs, and passes them to another module's `forward` by position."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.forward = with_signature(partial(_call_in_order, module, tuple(names)), names)


def _call_in_order(module: nn.Module, names: Sequence[str], **inputs: torch.Tensor) -> Any:
    return module(*(inputs[name] for name in names))


def with_signature(forward: Any, names: Sequence[str]) -> Any:
    """Return a function with these keyword arguments: torch.export reads the names of inputs from the signature."""
    inputs = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(inputs)
    return forward


def declared(
    module: nn.Module, inputs: Sequence[DeclaredInput], most_tokens: int = 0, has_declared_sizes: bool = False
) -> Subject:
    """Make a subject of a module and its declared inputs, with random examples.

    Raises ImportFailed if none of them run.
    """
    module, notes = _taking(module.eval(), [given.name for given in inputs])
    failure: Exception | None = None
    for bound in _BOUNDS:
        bounded = tuple(replace(given, bound=given.bound or bound) for given in inputs)
        examples = partial(_random_inputs, bounded, most_tokens)
        subject = Subject(module, bounded, examples, most_tokens, has_declared_sizes, notes=notes)
        try:
            subject.answer(subject.examples(2, 0))
            return subject
        except Exception as error:
            failure = error
    assert failure is not None
    shapes = ", ".join(f"{given.name} {given.datatype} {list(given.dims)}" for given in inputs)
    own = module.module if isinstance(module, ByPosition) else module
    takes = ", ".join(inspect.signature(own.forward).parameters)
    raise ImportFailed(
        f"the module, whose forward takes ({takes}), does not run with inputs {shapes}: {reason_of(failure)}"
    ) from failure


def outputs_of_rows(what: Path, subject: Subject, asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the kept and the dropped outputs of an entry. Raises ImportFailed for requested outputs that do not exist.

    An entry's outputs have a row for each row of the inputs, and no other size that grows with the rows. For example,
    CLIP's logits compare every image with every text.
    """
    with torch.no_grad():
        few, more = (subject.module(**subject.examples(rows, 0)) for rows in _TRIED_ROWS)
    fixed = all(given.dims[0] > 0 for given in subject.inputs)
    rows = [
        name
        for name in few
        if fixed
        or (
            (few[name].shape[:1], more[name].shape[:1]) == ((2,), (3,))
            and few[name].shape[1:] == more[name].shape[1:]
        )
    ]
    unknown = [name for name in asked if name not in few]
    if unknown:
        raise ImportFailed(f"{what}: --outputs: the model has no output {unknown[0]}; it has {', '.join(few)}")
    crossed = [name for name in asked if name not in rows]
    if crossed:
        raise ImportFailed(
            f"{what}: --outputs: {crossed[0]} has no row for each row of the inputs, but shape"
            f" {list(more[crossed[0]].shape)} for {_TRIED_ROWS[1]}; compute it in the client"
        )
    if not rows:
        raise ImportFailed(f"{what}: no output has a row for each row of the inputs ({', '.join(few) or 'none'})")
    return list(asked or rows), [] if asked else [name for name in few if name not in rows]


def _taking(module: nn.Module, names: Sequence[str]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a module that takes inputs of these names, and notes about it.

    If no name is an argument of `forward`, as for nn.Sequential with its single `input`, they go by position.
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except ValueError as error:
        raise ImportFailed(f"the module's forward has no signature, which names its inputs: {error}") from error
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any or any(name in parameters for name in names) or not all(map(str.isidentifier, names)):
        return module, ()
    pairs = ", ".join(f"{name} as {own}" for name, own in zip(names, parameters, strict=False))
    note = f"no input is named like an argument of forward, so they were bound in order: {pairs}"
    return ByPosition(module, names).eval(), (note,)


def with_examples(module: nn.Module, examples: Mapping[str, torch.Tensor]) -> Subject:
    """Make a subject of a module and its own example inputs. Takes their rows in turn; each has a batch dimension."""
    inputs = []
    for name, tensor in examples.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ImportFailed(f"example_inputs: {name} is not a tensor with the batch as first dimension")
        inputs.append(DeclaredInput(name, datatype_of(tensor.dtype), (-1, *tensor.shape[1:])))

    def rows(batch: int, seed: int) -> Tensors:
        return {name: tensor[(torch.arange(batch) + seed) % len(tensor)] for name, tensor in examples.items()}

    module, notes = _taking(module.eval(), list(examples))
    return Subject(module, tuple(inputs), rows, notes=notes)


def dtype_of(datatype: str) -> torch.dtype:
    """Return torch's type of a KServe datatype. Raises ImportFailed."""
    for dtype, name in DATATYPES.items():
        if name == datatype:
            return dtype
    raise ImportFailed(f"no datatype is called {datatype}; there are {', '.join(DATATYPES.values())}")


def datatype_of(dtype: torch.dtype) -> str:
    """Return KServe's name of a type. Raises ImportFailed."""
    if dtype not in DATATYPES:
        raise ImportFailed(f"KServe v2 has no datatype for {dtype}; let the module take another one")
    return DATATYPES[dtype]


def reason_of(error: BaseException) -> str:
    """Return the first lines of an error, which may be pages long."""
    said = _ADVICE.sub("", str(error))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    text = " ".join(lines[:2]) or type(error).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)  # a file's bytes may be escape codes
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}..."


ONE_TOKEN = -1
"""Seed of examples with one token, if the sequence length is dynamic."""


def _random_inputs(inputs: Sequence[DeclaredInput], most_tokens: int, batch: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    length = most_tokens if seed % 2 else min(16 + seed, most_tokens)  # the maximum, and shorter ones
    length = 1 if seed == ONE_TOKEN else length
    return {given.name: _random(given, batch, length, generator) for given in inputs}


def _random(given: DeclaredInput, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    dtype, shape = dtype_of(given.datatype), given.shape(batch, length)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    most = 2 if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.randint(0, min(given.bound or most, most), shape, generator=generator).to(dtype)

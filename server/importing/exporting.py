"""Exports a subject as a `.pt2` archive with a dynamic batch."""

import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from cohabit.planner.errors import CohabitError
from cohabit.server.errors import ImportFailed
from cohabit.server.importing.subject import Subject, Tensors, reason_of

_EXAMPLE_BATCH = 2
"""Above 1, because export would treat 1 as a constant."""
_LEAST_RANGE = 3
"""Export treats dimensions of 1 to 2 as different, even if they have the same name."""
_SEQUENCE = "sequence"
_LEAST_TOKENS = (1, 2)
"""Smallest dynamic sequence lengths, in the order tried: some models handle one token as a special case."""


_FIXED_SIZE = re.compile(r"marked L\['(\w+)'\]\.size\(\)\[(\d+)\] as dynamic but .*?constant \((\d+)\)", re.DOTALL)
"""torch.export's text for a dynamic dimension whose size the module fixes."""


class OneLengthOnly(ImportFailed):
    """The module cannot be exported with a dynamic sequence length."""


def export(subject: Subject, max_batch: int) -> ExportedProgram:
    """Export for batches of 1 to `max_batch`; 1 makes a fixed batch.

    Raises ImportFailed with torch's reason.
    """
    examples = subject.examples(min(_EXAMPLE_BATCH, max_batch), 0)
    try:
        inspect.signature(subject.module.forward).bind(**examples)
    except TypeError as error:
        names = ", ".join(inspect.signature(subject.module.forward).parameters)
        raise ImportFailed(f"the module takes ({names}), the inputs are {', '.join(examples)}: {error}") from error
    _refuse_outputs(subject, examples)
    for least in _LEAST_TOKENS[:-1] if subject.most_tokens > 1 else ():
        with suppress(Exception):
            return _exported(subject, examples, max_batch, least)
    try:
        return _exported(subject, examples, max_batch, _LEAST_TOKENS[-1])
    except Exception as error:
        if "specialized" in str(error) and f"({_SEQUENCE})" in str(error):
            raise OneLengthOnly(
                "torch.export takes the module at one sequence length only, because it has a loop over the tokens;"
                " choose a length, to which clients pad, with --sequence-length N"
            ) from error
        way_out = (
            "If it takes one batch size only, declare its inputs with it (--input NAME:TYPE:1,...); otherwise change"
            " the module, or export it in your own code"
        )
        raise ImportFailed(f"torch.export does not take the module: {why_not_exported(error, way_out)}") from error


def why_not_exported(error: Exception, way_out: str) -> str:
    """Return in one line why torch.export refuses a module, and the way out; `way_out` is for unknown reasons."""
    if isinstance(error, CohabitError):
        return str(error)
    if "data-dependent" in str(error):
        return f"what it computes depends on values, in {_own_line(error)}; change it (torch.where, torch.cond)"
    if (fixed := _FIXED_SIZE.search(str(error))) is not None:
        name, axis, size = fixed.groups()
        return (
            f"dimension {axis} of input {name} is declared as dynamic, and the module works for one size of it only"
            f" ({size} was tried), as an LSTM or a loop over the dimension does; declare a number instead of -1"
        )
    return f"{reason_of(error)}. {way_out}"


def _refuse_outputs(subject: Subject, examples: dict[str, torch.Tensor]) -> None:
    """Raise ImportFailed for outputs other than tensors. Numbers and None among tensors are dropped, as usual."""
    with torch.no_grad():
        leaves, _ = pytree.tree_flatten_with_path(subject.module(**examples))
    rule = "let forward return tensors, alone or in tuples, lists and dictionaries"
    for path, leaf in leaves:
        if not isinstance(leaf, torch.Tensor | int | float | None):
            raise ImportFailed(f"output{pytree.keystr(path)} is a {type(leaf).__name__}, {leaf!r:.40}; {rule}")
    if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for _, leaf in leaves})) or "nothing"
        raise ImportFailed(f"the module returns no tensor, but {kinds}; {rule}")


def _exported(
    subject: Subject, examples: dict[str, torch.Tensor], max_batch: int, least_tokens: int
) -> ExportedProgram:
    return exported(subject.module, examples, _dynamic_dims(subject, max_batch, least_tokens))


def exported(module: nn.Module, examples: Tensors, dims: Any = None) -> ExportedProgram:
    """Export a module that takes its inputs by name. torch.export raises any type of exception; see `why_not_exported`.

    `dims` are the dynamic dimensions, as torch.export takes them.
    """
    # opt_einsum orders the contractions of `torch.einsum` by the example's sizes, which fixes them.
    with _quiet(), torch.no_grad(), torch.backends.opt_einsum.flags(enabled=False):
        return torch.export.export(module, (), examples, dynamic_shapes=dims)


def _own_line(error: Exception) -> str:
    """Return the last line outside torch that led to an error."""
    library = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(library) and Path(f.filename).name != "contextlib.py"]
    return f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's output during export: warnings, and the whole graph on failure."""
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def save(program: ExportedProgram, path: Path) -> None:
    """Write an archive. Raises ImportFailed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _quiet():
            torch.export.save(program, path)
    except Exception as error:
        raise ImportFailed(f"the archive cannot be written: {reason_of(error)}") from error


def _dynamic_dims(subject: Subject, max_batch: int, least_tokens: int) -> dict[str, dict[int, Any]]:
    """Return the dynamic dimensions of each input by position."""
    batch = Dim("batch", min=1, max=max(max_batch, _LEAST_RANGE)) if max_batch > 1 else None
    length: Any = None
    if subject.most_tokens:
        length = Dim(_SEQUENCE, min=least_tokens, max=subject.most_tokens)
    if subject.most_tokens and subject.has_declared_sizes:  # torch determines which of them are equal
        length = Dim.DYNAMIC(min=least_tokens, max=subject.most_tokens)
    if subject.decoding is not None:
        ranges = subject.decoding.ranges
        sizes = {n: {p: Dim(f"{n}_{p}", min=a, max=b) for p, (a, b) in own.items()} for n, own in ranges.items()}
        return {
            given.name: sizes.get(given.name, {}) | ({} if batch is None else {0: batch})
            for given in subject.inputs
        }
    dims = {
        given.name: {p: length if p else batch for p, d in enumerate(given.dims) if d < 0}
        for given in subject.inputs
    }
    return {name: {p: dim for p, dim in found.items() if dim is not None} for name, found in dims.items()}

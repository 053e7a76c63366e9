"""Lowers a `.pt2` archive: graph rewritten, weights file written, one traced program per batch size."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from planner import cache_file
from planner.errors import CohabitError, FormatError
from planner.graph import Graph
from runtime.errors import UnsupportedModel
from runtime.lowering import artifact, packing, weights
from runtime.lowering.archive_file import fingerprint
from runtime.lowering.interaction import find_interaction
from runtime.lowering.model import FxModel, Port
from runtime.lowering.rewrite import rewrite
from runtime.lowering.trace import Trace, build_graph, run_model, trace_model
from runtime.lowering.weights import Manifest
from runtime.options import DEFAULTS, Options

_LOWERING = "10"
"""Changes whenever lowering writes other bytes for the same archive."""


class NotCached(CohabitError):
    """A model that should be in the cache is not, or is damaged there."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """A model ready to be profiled and planned. `traces[b]` and `graphs[b]` are for batch `b`."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batched: bool
    """Whether the first dimension of every input and output is the batch."""
    traces: dict[int, Trace]
    manifest: Manifest
    weights_path: Path
    options: Options = DEFAULTS
    interaction: str | None = None
    """How the rows of a batch influence one another; None if they were not seen to. See `find_interaction`."""

    @cached_property
    def graphs(self) -> dict[int, Graph]:
        return {b: build_graph(self.name, trace, self.manifest) for b, trace in self.traces.items()}

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted(self.traces))

    def examples(self, batch: int) -> list[torch.Tensor]:
        return example_inputs(self.inputs, batch)


def example_inputs(ports: Iterable[Port], batch: int) -> list[torch.Tensor]:
    """Inputs that any model accepts: zeros for integers (an index that every table has), else seeded noise."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for port in ports:
        shape = port.at(batch)
        if port.dtype.is_floating_point:
            examples.append(torch.rand(shape, generator=generator).to(port.dtype))
        else:
            examples.append(torch.zeros(shape, dtype=port.dtype))
    return examples


def lower(
    path: Path,
    name: str,
    batches: Iterable[int],
    cache: Path,
    on_progress: Callable[[str], None] = lambda text: None,
    options: Options = DEFAULTS,
    *,
    cached_only: bool = False,
) -> Lowered:
    """Lower an archive for the given batch sizes; those it was not exported for are left out.

    The weights file goes to `cache`, keyed by the archive, and is used again when it is there. Raises ArchiveError
    for a bad archive and UnsupportedModel for a program that cannot be planned. With `cached_only`, the archive is
    not read; NotCached is raised if the cache does not have it, or has it damaged.
    """
    own_fingerprint = fingerprint(path)
    folder = cache / f"{own_fingerprint[:32]}{options.label}"
    wanted = sorted(set(batches))
    known = _known(name, folder, wanted, options)
    if known is not None:
        return known
    if cached_only:
        raise NotCached(f"{name}: the cache has no undamaged copy of it")
    on_progress(f"{name}: reading {path.name}")
    model = _read(path, name)
    usable = _usable(model, wanted)
    rewrite(model, options, usable)
    own = own_storages(model.weights)
    on_progress(f"{name}: tracing batches, and comparing their rows")
    runs = _Runs(model, own)
    interaction = find_interaction(model, usable, runs.outputs)
    traces = {batch: runs.trace(batch) for batch in usable}
    first = traces[min(traces)]
    readers = first.readers()
    uses = [weights.WeightUse(n, own[n], readers[n]) for n in dict.fromkeys(first.weight_slots.values())]
    archive = f"{own_fingerprint}/{_LOWERING}{options.label}"
    manifest = weights.lay_out(archive, uses, model.tables, _machine(options))
    weights_path = folder / "weights.bin"
    if weights.read(weights_path, _machine(options)) != manifest:
        on_progress(f"{name}: writing {manifest.file_bytes >> 20} MiB of weights")
        weights.write(weights_path, manifest, own, model.tables)
    batched = model.max_batch is not None
    encoded = artifact.encode(_stamp(wanted, options), model.inputs, model.outputs, batched, traces, interaction)
    cache_file.write(folder / _artifact_name(wanted, options), encoded)
    return Lowered(name, model.inputs, model.outputs, batched, traces, manifest, weights_path, options, interaction)


def _read(path: Path, name: str) -> FxModel:
    """Read an archive. Torch's deserializer takes seconds to import, which a server with a full cache need not."""
    from runtime.lowering.archive import read
    from runtime.lowering.exported import from_program

    return from_program(name, read(path))


def _machine(options: Options) -> str | None:
    return packing.machine() if options.packed else None


def _stamp(batches: Sequence[int], options: Options) -> str:
    """Return what the cached file depends on besides its archive."""
    made = f"lowering {_LOWERING}, torch {torch.__version__}, batches {','.join(map(str, batches))}"
    return f"{made}, packed for {_machine(options)}" if options.packed else made


def _artifact_name(batches: Sequence[int], options: Options) -> str:
    return f"program-{hashlib.sha256(_stamp(batches, options).encode()).hexdigest()[:16]}.json"


def _known(name: str, folder: Path, batches: Sequence[int], options: Options) -> Lowered | None:
    """Return what an earlier run lowered from the same archive, if all of it is there and undamaged."""
    weights_path = folder / "weights.bin"
    try:
        raw = cache_file.read(folder / _artifact_name(batches, options))
        inputs, outputs, batched, interaction, traces = artifact.decode(raw, _stamp(batches, options))
    except (FileNotFoundError, FormatError):
        return None
    manifest = weights.read(weights_path, _machine(options))
    if manifest is None:
        return None
    return Lowered(name, inputs, outputs, batched, traces, manifest, weights_path, options, interaction)


def _usable(model: FxModel, batches: Iterable[int]) -> list[int]:
    if model.max_batch is None:
        return [model.inputs[0].shape[0] or 1 if model.inputs[0].shape else 1]
    usable = sorted({b for b in batches if 1 <= b <= model.max_batch})
    if not usable:
        raise UnsupportedModel(
            f"{model.name}: exported for batches up to {model.max_batch}, none of which is wanted"
        )
    return usable


class _Runs:
    """Runs a model, and traces its first run at each batch size."""

    def __init__(self, model: FxModel, own: dict[str, torch.Tensor]) -> None:
        self._model, self._own = model, own
        self._traces: dict[int, Trace] = {}

    def outputs(self, batch: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a model's outputs. Its own in-place operators may change the inputs."""
        if batch in self._traces:
            return run_model(self._model, self._own, inputs)
        self._traces[batch], outputs = trace_model(self._model, self._own, batch, inputs)
        return outputs

    def trace(self, batch: int) -> Trace:
        """Return the trace at a batch size. Raises UnsupportedModel."""
        if batch not in self._traces:
            try:
                self.outputs(batch, example_inputs(self._model.inputs, batch))
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                raise UnsupportedModel(f"{self._model.name}: does not run at batch {batch}: {error}") from error
        return self._traces[batch]


def own_storages(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights as dense tensors with a storage each; tied weights (same bytes, same shape) share one."""
    known: dict[tuple[object, ...], torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key: tuple[object, ...] = (tensor.dtype, tuple(tensor.shape), tensor.numel() or name)
        if packing.is_packed(tensor):
            own[name] = known.setdefault((packing.storage_key(tensor), *key), tensor)
            continue
        key = (tensor.data_ptr(), tuple(tensor.stride()), *key)
        if key not in known:
            known[key] = _own_storage(tensor)
        own[name] = known[key]
    return own


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    source = tensor if dense else tensor.contiguous()
    if source.numel() == 0:
        return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
    nbytes = source.numel() * source.element_size()
    raw = torch.empty(0, dtype=torch.uint8).set_(
        source.untyped_storage(), source.storage_offset() * source.element_size(), (nbytes,), (1,)
    )
    # Through numpy, because that gives a storage of its own over the same bytes.
    flat = (
        torch.from_numpy(raw.numpy()).view(source.dtype)
        if _aligned(raw, source)
        else raw.clone().view(source.dtype)
    )
    return flat.as_strided(source.shape, source.stride())


def _aligned(raw: torch.Tensor, source: torch.Tensor) -> bool:
    return raw.data_ptr() % source.element_size() == 0

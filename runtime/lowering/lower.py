"""Lowers a `.pt2` archive: rewrites its graph, writes a weights file, and traces a program for each bucket."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from cohabit.planner import cache_file
from cohabit.planner.errors import CohabitError, FormatError
from cohabit.planner.graph import Graph
from cohabit.planner.shapes import DEFAULT_BUCKETS, STATIC, Bucket, Dimension, DynamicShape, ShapeBuckets
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering import artifact, packing, weights
from cohabit.runtime.lowering.archive_file import ArchiveFile, noted_fingerprint, notes_of
from cohabit.runtime.lowering.encoding.choice import Encoding, encode_lossy, exact_codecs, shorten_tables
from cohabit.runtime.lowering.encoding.int8_layers import int8_layers
from cohabit.runtime.lowering.interaction import find_interaction, tolerance_of
from cohabit.runtime.lowering.model import FxModel, Port
from cohabit.runtime.lowering.rewrite import RewriteFailed, rewrite
from cohabit.runtime.lowering.trace import Trace, build_graph, covering, run_model, trace_model
from cohabit.runtime.lowering.validation import LeftOut, Reference, Sample, Validation, samples_of, validated
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.options import DEFAULTS, Options

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_log = logging.getLogger("cohabit.runtime")
MOST_BUCKETS = 64
"""Maximum number of buckets of a model: each has a plan, and programs in memory."""
_INT8_BATCH: Final = 8
"""Batch for which weights in int8 are packed, whatever batches are planned."""
_CHECKED_BATCHES = 2
"""Number of batch sizes that are traced at several shapes per bucket. Two suffice: torch specialises only batch 1."""
_LOWERING = "28"
"""Version of lowering. It changes whenever lowering writes other bytes for the same archive."""
_FOLDER = re.compile(r"([0-9a-f]{32})(?:-[a-z0-9]+)*", re.ASCII)
_OF_THE_FILE = frozenset({"lowering", "weights", "traces", "format_version"})
"""Fields of a program's file that a lowered model has in another form."""


class NotCached(CohabitError):
    """A model that should be in the cache is not, or is damaged there."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """A model ready to be profiled and planned. `traces[b]` and `graphs[b]` are for bucket `b`."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batched: bool
    """Whether the first dimension of every input and output is the batch."""
    traces: dict[Bucket, Trace]
    manifest: Manifest
    weights_path: Path
    options: Options = DEFAULTS
    interaction: str | None = None
    """How the rows of a batch influence one another: the op that mixes them, or a trial that shows it. None if they are
    independent, or were not compared."""
    dynamic: DynamicShape = STATIC
    """Dynamic dimensions other than the batch."""
    changed_inputs: tuple[str, ...] = ()
    """Inputs that the archive's program changes in place. Callers' tensors stay unchanged."""
    validation: Validation | None = None
    """How the program was compared with the archive's; None if it is not from an archive."""
    encoding: Encoding | None = None
    """How weights are rounded; None if they are exact."""
    saved_bytes: int = 0
    """Bytes that encoding saves in tables, and in weights that compute in int8."""

    @cached_property
    def graphs(self) -> dict[Bucket, Graph]:
        return {b: build_graph(self.name, trace, self.manifest) for b, trace in self.traces.items()}

    def lent(self, names: Iterable[str]) -> "Lowered":
        """Return the model without the bytes of these inputs, whose memory the caller has and counts.

        Inputs that a program changes in place are copied for each run, and count.
        """
        changed = {
            storage.index
            for trace in self.traces.values()
            for op in trace.ops
            for storage in op.mutates
            if storage.kind == "input"
        }
        lent = {n for n, port in enumerate(self.inputs) if port.name in set(names)} - changed
        if not lent:
            return self
        traces = {
            bucket: replace(
                trace, input_bytes=tuple(0 if n in lent else nbytes for n, nbytes in enumerate(trace.input_bytes))
            )
            for bucket, trace in self.traces.items()
        }
        return replace(self, traces=traces)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, however they are stored."""
        return self.manifest.segment_bytes + self.manifest.table_bytes + self.saved_bytes

    @property
    def archive(self) -> str:
        """Fingerprint of the archive."""
        return self.manifest.archive.partition("/")[0]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(sorted(self.traces))

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({bucket.batch for bucket in self.traces}))

    def shapes(self, bucket: Bucket) -> list[tuple[int, ...]]:
        """Return the largest shapes of inputs, then outputs, in a bucket."""
        symbols = self.dynamic.symbols(bucket.sizes)
        return [port.at(bucket.batch, symbols) for port in (*self.inputs, *self.outputs)]

    def examples(self, bucket: Bucket) -> list[torch.Tensor]:
        return example_inputs(self.inputs, bucket.batch, self.dynamic.symbols(bucket.sizes))


def example_inputs(ports: Iterable[Port], batch: int, symbols: Mapping[str, int]) -> list[torch.Tensor]:
    """Return inputs that any model accepts: zeros for integers (an index valid in every table), else seeded noise."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for port in ports:
        shape = port.at(batch, symbols)
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
    shape_buckets: ShapeBuckets = DEFAULT_BUCKETS,
) -> Lowered:
    """Lower an archive for the given batch sizes, except those it was not exported for.

    `shape_buckets` has the sizes of the other dynamic dimensions (default: powers of two).

    The weights file is written to `cache`, keyed by the archive, and reused from there. Raises ArchiveError for a bad
    archive and UnsupportedModel for a program that cannot be planned.
    """
    wanted = sorted(set(batches))
    noted = noted_fingerprint(path, notes_of(cache))
    if noted is not None:
        known = _known(name, Entry(cache, noted, wanted, options, shape_buckets))
        if known is not None:
            return known
    with ArchiveFile(path) as archive:
        on_progress(f"{name}: reading {path.name}")
        entry = Entry(cache, archive.fingerprint, wanted, options, shape_buckets)
        known = None if entry.archive == noted else _known(name, entry)
        lowered = known or _lower(archive, name, entry, on_progress)
        archive.note(notes_of(cache))
    return lowered


def cached(
    archive: str,
    name: str,
    batches: Iterable[int],
    cache: Path,
    options: Options,
    shape_buckets: ShapeBuckets = DEFAULT_BUCKETS,
) -> Lowered:
    """Return the cached result of `lower` for an archive of this fingerprint. Raises NotCached."""
    entry = Entry(cache, archive, sorted(set(batches)), options, shape_buckets)
    known = _known(name, entry)
    if known is None:
        others = [path for path in entry.folder.glob("program-*.json") if path != entry.program_path]
        if others and not entry.program_path.exists():
            raise NotCached(f"{name}: it was lowered for other batch sizes or shape buckets only")
        raise NotCached(f"{name}: the cache has no undamaged copy of it")
    return known


def _lower(archive: ArchiveFile, name: str, entry: "Entry", on_progress: Callable[[str], None]) -> Lowered:
    from cohabit.runtime.lowering.archive import read  # torch's deserializer takes seconds to import

    # Validation runs the rewritten program; the traces of these runs are reused below.
    program, guards = read(archive)
    entry.folder.mkdir(parents=True, exist_ok=True)
    on_progress(f"{name}: comparing with the archive's program")
    runs, validation, samples = _validated(name, program, guards, entry)
    codecs, encoding = exact_codecs(runs.own), None
    if entry.options.weights != "float32":
        on_progress(f"{name}: comparing weights in {entry.options.weights} with exact ones")
        run = partial(_outputs_of, samples)
        asked, unchecked = entry.options.weights, validation.unchecked
        computing = _int8_layers(runs, entry)
        lossy, encoding = encode_lossy(runs.model, runs.own, asked, run, unchecked, computing)
        codecs |= lossy
        # Trace again: encoded tables and layers in int8 change the ops.
        runs = _Runs(runs.model, own_storages(runs.model.weights), runs.buckets, runs.applied)
    model, own = runs.model, runs.own
    interaction, traces = _traced(name, runs, program, entry, on_progress)
    # Lay weights out in the order in which the smallest bucket's ops read them. An undamaged file with the same
    # manifest is kept.
    first = traces[min(traces)]
    readers = first.readers()
    uses = [
        weights.WeightUse(n, own[n], readers[n], codecs.get(n, "plain"))
        for n in dict.fromkeys(first.weight_slots.values())
    ]
    manifest = weights.lay_out(entry.origin, uses, model.tables, entry.machine)
    weights_path = entry.weights_path(manifest.fingerprint)
    if weights.read(weights_path) != manifest:
        on_progress(f"{name}: writing {manifest.file_bytes >> 20} MiB of weights")
        weights.write(weights_path, manifest, own, model.tables, archive.refuse_change)
    program_file = artifact.LoweredProgram(
        lowering=entry.stamp,
        weights=manifest.fingerprint,
        inputs=model.inputs,
        outputs=model.outputs,
        batched=model.max_batch is not None,
        traces=artifact.encode_traces(traces),
        interaction=interaction,
        dynamic=model.dynamic,
        changed_inputs=model.changed_inputs,
        validation=validation,
        encoding=encoding,
        saved_bytes=model.saved_bytes,
    )
    # The program file comes last: it names the weights file and completes the cache entry.
    archive.refuse_change()
    cache_file.write(entry.program_path, artifact.encode(program_file))
    return _lowered(name, entry, program_file, traces, manifest)


def _validated(
    name: str, program: "ExportedProgram", guards: Sequence[str], entry: "Entry"
) -> tuple["_Runs", Validation, list[Sample]]:
    """Rewrite a program, and validate it against the exported one on samples. Raises UnsupportedModel."""

    failed: dict[str, LeftOut] = {}

    def make(left_out: frozenset[str]) -> _Runs:
        while True:
            try:
                return _rewritten(name, program, guards, entry, left_out.union(failed))
            except RewriteFailed as error:
                failed[error.rewrite] = LeftOut(error.rewrite, (), f"it fails: {error}")

    reference, runs = Reference(program, entry.options), make(frozenset())
    if (drawing := reference.random_op) is not None:
        return runs, Validation(0, 0.0, tuple(failed.values()), f"op {drawing} draws random numbers"), []
    model, symbols = runs.model, {b: runs.model.dynamic.symbols(b.sizes) for b in runs.buckets}
    samples = samples_of(reference, model.inputs, runs.buckets, symbols)
    if not samples:
        unchecked = "the program takes none of the inputs that were tried"
        return runs, Validation(0, 0.0, tuple(failed.values()), unchecked), []
    limit = max(tolerance_of(model), entry.options.tolerance)
    try:
        runs, validation = validated(reference, samples, model.outputs, limit, runs, make)
        left_out = (*validation.left_out, *failed.values())
        return runs, msgspec.structs.replace(validation, left_out=left_out), samples
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error


def _int8_layers(runs: "_Runs", entry: "Entry") -> frozenset[str]:
    """Return the weights whose layers are to compute in int8; none without the kernels of a CPU."""
    if entry.options.weights != "int8" or not entry.options.packed:
        return frozenset()
    model = runs.model
    return int8_layers(model, [_symbols(model, b) for b in _packed_for(model, entry.options, runs.buckets)])


class _Traced(NamedTuple):
    """Traces of a rewritten program, and how its rows influence one another; the same for all values of its weights."""

    graph_module: object
    """The archive's program."""
    form: str
    interaction: str | None
    traces: dict[Bucket, Trace]


_last: _Traced | None = None
"""The last program that this process traced. Models of a family are often lowered one after the other."""


def _traced(
    name: str, runs: "_Runs", program: "ExportedProgram", entry: "Entry", on_progress: Callable[[str], None]
) -> tuple[str | None, dict[Bucket, Trace]]:
    """Return how rows influence one another, and the trace of each bucket, the smallest batch sizes at several shapes.

    Both follow from the program and the forms of its weights: a trial of rows, the second test after the proof, is made
    with the first member's values.
    """
    global _last
    known, form = _last, _form_of(runs, entry)
    if known is not None and known.graph_module is program.graph_module and known.form == form:
        return known.interaction, known.traces
    on_progress(f"{name}: tracing batches, and comparing their rows")
    model, buckets, usable = runs.model, runs.buckets, sorted({b.batch for b in runs.buckets})
    interaction = None
    if max(usable) > 1:
        interaction = model.mixing or find_interaction(model, usable, runs.symbols, runs.outputs)
    traces: dict[Bucket, Trace] = {}
    for bucket in buckets:
        sizes = model.dynamic.checked(bucket.sizes) if bucket.batch in usable[:_CHECKED_BATCHES] else [bucket.sizes]
        traces[bucket] = covering(name, [runs.trace(bucket, s) for s in sizes])
    _last = _Traced(program.graph_module, form, interaction, traces)
    return interaction, traces


def _form_of(runs: "_Runs", entry: "Entry") -> str:
    """Return a digest of a rewritten program, its options and its weights without their values.

    Rewrites may depend on values, and tied weights share a storage.
    """
    nodes = [(node.op, node.name, node.target, node.args, node.kwargs) for node in runs.model.graph.nodes]
    first: dict[int, str] = {}
    forms = [
        (
            first.setdefault(packing.storage_key(tensor), name),
            tensor.dtype,
            tuple(tensor.shape),
            packing.layout_of(tensor) if packing.is_packed(tensor) else tensor.stride(),
        )
        for name, tensor in (*runs.own.items(), *runs.model.tables.items())
    ]
    made_with = entry.options, entry.stamp.partition(entry.archive)[2], torch.get_num_threads(), runs.model.mixing
    return hashlib.sha256(repr((made_with, runs.buckets, nodes, forms)).encode()).hexdigest()


def _outputs_of(
    samples: Sequence[Sample], model: FxModel, weights: Mapping[str, torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return a model's outputs on the samples that have no NaN and no infinity, computed with these weights."""
    ordinary = [sample.inputs for sample in samples if not sample.broken]
    return [run_model(model, dict(weights), [tensor.clone() for tensor in inputs]) for inputs in ordinary]


def _rewritten(
    name: str, program: "ExportedProgram", guards: Sequence[str], entry: "Entry", left_out: frozenset[str]
) -> "_Runs":
    from cohabit.runtime.lowering.exported import compute_sizes_first, from_program

    model = from_program(name, program, guards)
    model.folder = entry.folder
    buckets = _buckets(model, entry.batches, entry.shape_buckets)
    shapes = [_symbols(model, bucket) for bucket in _packed_for(model, entry.options, buckets)]
    if model.max_batch is not None:
        # It imports sympy, whose 32 MiB a server of a bundle does not need.
        from cohabit.runtime.lowering.rows.proof import find_mixing

        model.mixing = find_mixing(model, _followed_sizes(model, buckets))
    applied = rewrite(model, entry.options, shapes, left_out)
    if entry.options.weights == "float32":
        shorten_tables(model)
    compute_sizes_first(model)
    return _Runs(model, own_storages(model.weights), buckets, applied)


def _followed_sizes(model: FxModel, buckets: Sequence[Bucket]) -> list[dict[str, int]]:
    """Return the symbols' values at which the batch is followed: several shapes of the smallest and largest bucket."""
    sizes = [s for bucket in (min(buckets), max(buckets)) for s in model.dynamic.checked(bucket.sizes)]
    return [model.dynamic.symbols(own) for own in dict.fromkeys(sizes)]


def _lowered(
    name: str, entry: "Entry", program: artifact.LoweredProgram, traces: dict[Bucket, Trace], manifest: Manifest
) -> Lowered:
    kept = {n: v for n, v in msgspec.structs.asdict(program).items() if n not in _OF_THE_FILE}
    weights_path = entry.weights_path(program.weights)
    return Lowered(
        name=name, traces=traces, manifest=manifest, weights_path=weights_path, options=entry.options, **kept
    )


@dataclass(frozen=True)
class Entry:
    """Cache entry of a lowered model. Each of its files records its origin, and is used only if that matches."""

    cache: Path
    archive: str
    """Fingerprint of the archive."""
    batches: Sequence[int]
    options: Options
    shape_buckets: ShapeBuckets

    @property
    def folder(self) -> Path:
        threads = f"-{torch.get_num_threads()}" if self.options.packed else ""
        return self.cache / f"{self.archive[:32]}{self.options.label}{threads}"

    @property
    def machine(self) -> str | None:
        return packing.machine() if self.options.packed else None

    @property
    def origin(self) -> str:
        """Identity of everything that determines a weights file: archive, lowering version, options."""
        return f"{self.archive}/{_LOWERING}{self.options.label}"

    @cached_property
    def stamp(self) -> str:
        """Identity of everything that determines a program: also torch's version, batch sizes, buckets, and machine."""
        made = f"archive {self.archive}, lowering {_LOWERING}, torch {torch.__version__}"
        made += f", batches {','.join(map(str, self.batches))}"
        if wanted := str(self.shape_buckets):
            made += f", buckets {wanted}"
        return f"{made}, packed for {self.machine}" if self.options.packed else made

    @property
    def program_path(self) -> Path:
        return self.folder / f"program-{hashlib.sha256(self.stamp.encode()).hexdigest()[:16]}.json"

    def weights_path(self, manifest: str) -> Path:
        """Path of the weights file whose manifest has this fingerprint."""
        return self.folder / _weights_name(manifest)


def _weights_name(manifest: str) -> str:
    return f"weights-{manifest[:16]}.bin"


def folders_of(cache: Path) -> dict[Path, str]:
    """Return the folders of lowered models. The values are the first 32 digits of their archives' fingerprints."""
    if not cache.is_dir():
        return {}
    named = {folder: _FOLDER.fullmatch(folder.name) for folder in sorted(cache.iterdir())}
    return {folder: name[1] for folder, name in named.items() if name is not None and folder.is_dir()}


def graphs_of(folder: Path) -> set[str]:
    """Return the graph fingerprints of all programs in a folder of `folders_of`, except damaged programs."""
    found: set[str] = set()
    for path in folder.glob("program-*.json"):
        with suppress(OSError, FormatError):
            program, traces = artifact.decode(cache_file.read(path), None)
            manifest = weights.manifest_of(folder / _weights_name(program.weights))
            found |= {build_graph("", trace, manifest).fingerprint for trace in traces.values()}
    return found


def _known(name: str, entry: Entry) -> Lowered | None:
    """Return the cached program of this entry; None if it is incomplete or damaged."""
    try:
        program, traces = artifact.decode(cache_file.read(entry.program_path), entry.stamp)
    except (FileNotFoundError, FormatError):
        return None
    manifest = weights.read(entry.weights_path(program.weights))
    if manifest is None or manifest.fingerprint != program.weights:
        return None
    return _lowered(name, entry, program, traces, manifest)


def _buckets(model: FxModel, batches: Iterable[int], shape_buckets: ShapeBuckets) -> list[Bucket]:
    """Choose buckets for each dynamic dimension. Returns the model's, smallest first. Raises UnsupportedModel."""
    _refuse_unknown(model, shape_buckets)
    wanted = {d.symbol: shape_buckets.of(model.inputs[d.input].name, d.axis) for d in model.dynamic.dimensions}
    if unlimited := [d for d in model.dynamic.dimensions if d.most is None and not wanted[d.symbol]]:
        d = unlimited[0]
        raise UnsupportedModel(
            f"{model.name}: {_named(model, d)} was exported without a largest size; export it with"
            " Dim(..., max=N), or give the sizes to plan for with --shape-buckets or the model's own parameter"
            " cohabit.shape_buckets of config.pbtxt"
        )
    usable = _usable(model, batches)
    usable = [b for b in usable if _takes(model, b, wanted)] or usable
    constraints = tuple(_at_batches(model, usable))
    model.dynamic = msgspec.structs.replace(model.dynamic, constraints=constraints).bucketed(*wanted.values())
    model.dynamic = _limited(model, len(usable), [not sizes for sizes in wanted.values()])
    dimensions = model.dynamic.dimensions
    for d in dimensions:
        if not d.buckets:
            sizes = wanted[d.symbol]
            why = f"; --shape-buckets has {', '.join(map(str, sizes))}" if sizes else ""
            if model.dynamic.valid(d, max(d.least, d.most or 0, *sizes)) is None:  # no buckets would help
                fixed = next((c for c in model.dynamic.conditions(d) if "==" in c), "conditions that no size meets")
                why = f"; its export requires {fixed}, so export it with a fixed size"
            raise UnsupportedModel(f"{model.name}: {_named(model, d)} is {d.least} or larger{why}")
    count = len(usable) * math.prod(len(d.buckets) for d in dimensions)
    if dimensions and count > MOST_BUCKETS:
        named = "; ".join(f"{_named(model, d)} {', '.join(map(str, d.buckets))}" for d in dimensions)
        raise UnsupportedModel(
            f"{model.name}: {len(usable)} batch sizes and the sizes of its dynamic dimensions ({named}) are {count}"
            f" combinations to plan, the limit is {MOST_BUCKETS}; name fewer with --shape-buckets or --batch-sizes"
        )
    return [Bucket(batch, sizes) for batch in usable for sizes in model.dynamic.buckets]


def _takes(model: FxModel, batch: int, wanted: Mapping[str, Sequence[int]]) -> bool:
    """Whether a program accepts any sizes of its dynamic dimensions at this batch size."""
    constraints = tuple(_at_batches(model, [batch]))
    own = msgspec.structs.replace(model.dynamic, constraints=constraints).bucketed(*wanted.values())
    return all(d.buckets for d in own.dimensions)


def _refuse_unknown(model: FxModel, shape_buckets: ShapeBuckets) -> None:
    """Raise UnsupportedModel for sizes of a dimension that is not dynamic. Inputs of other models are ignored."""
    inputs = {port.name for port in model.inputs}
    known = [f"{model.inputs[d.input].name}.{d.axis}" for d in model.dynamic.dimensions]
    allowed = {*known, *(name.rpartition(".")[0] for name in known)}
    for name, _ in shape_buckets.own:
        own = name if name in inputs else name.rpartition(".")[0]
        if own in inputs and name not in allowed:
            there_is = f"has {', '.join(known)}" if known else "has none besides the batch"
            raise UnsupportedModel(
                f"{model.name}: --shape-buckets names {name}, which is not a dynamic dimension of its own; the model"
                f" {there_is}"
            )


def _limited(model: FxModel, batches: int, by_default: Sequence[bool]) -> DynamicShape:
    """Return the dynamic dimensions with at most MOST_BUCKETS combinations. Logs a warning if buckets are left out.

    Only dimensions with default buckets lose any. As long as there are too many combinations, the one with the most
    buckets loses every other bucket, but never the largest or a size of 1.
    """
    dimensions = list(model.dynamic.dimensions)
    thinned = [k for k in range(len(dimensions)) if by_default[k]]
    while thinned and batches * math.prod(len(d.buckets) for d in dimensions) > MOST_BUCKETS:
        index = max(thinned, key=lambda k: len(dimensions[k].buckets))
        buckets = dimensions[index].buckets
        one, others = buckets[: buckets[0] == 1], buckets[buckets[0] == 1 :]
        if len(others) < 2:
            break
        dimensions[index] = msgspec.structs.replace(dimensions[index], buckets=(*one, *others[::-1][::2][::-1]))
    if dimensions != list(model.dynamic.dimensions):
        sizes = {_named(model, d): list(d.buckets) for d in dimensions}
        _log.warning(
            f"fewer sizes of dynamic dimensions are planned than usual, because {MOST_BUCKETS} combinations are the"
            " limit; --shape-buckets or --batch-sizes chooses others",
            extra={"fields": {"model": model.name, "sizes": sizes}},
        )
    return msgspec.structs.replace(model.dynamic, dimensions=tuple(dimensions))


def _at_batches(model: FxModel, batches: Sequence[int]) -> Iterator[str]:
    """Yield the conditions on dynamic dimensions, with each batch size substituted for the batch symbol."""
    for condition in model.dynamic.constraints:
        parts = re.split(rf"\b{model.batch_symbol}\b", condition)
        yield from dict.fromkeys(str(batch).join(parts) for batch in batches)


def _named(model: FxModel, dimension: Dimension) -> str:
    return f"dimension {dimension.axis} of input {model.inputs[dimension.input].name}"


def _usable(model: FxModel, batches: Iterable[int]) -> list[int]:
    if model.max_batch is None:
        first = next(iter(model.inputs[0].shape), None)
        return [first if isinstance(first, int) and first else 1]
    usable = sorted({b for b in batches if 1 <= b <= model.max_batch})
    if not usable:
        raise UnsupportedModel(
            f"{model.name}: exported for batches up to {model.max_batch}, and all requested batch sizes are larger"
        )
    return usable


def _symbols(model: FxModel, bucket: Bucket) -> dict[str, int]:
    """Return the value of every symbol in a bucket's largest shape."""
    batch = {} if model.batch_symbol is None else {model.batch_symbol: bucket.batch}
    return batch | model.dynamic.symbols(bucket.sizes)


def _packed_for(model: FxModel, options: Options, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """Return the buckets for which weights are packed.

    In int8, blocks of a packed weight share a scale, so its rounding depends on its layout. There, one bucket that
    follows from the archive is used, so that answers do not depend on the planned batch sizes.
    """
    if options.weights == "int8" and model.max_batch is not None:
        return [Bucket(min(model.max_batch, _INT8_BATCH), max(b.sizes for b in buckets))]
    return buckets


class _Runs:
    """Runs a model after its rewrites, and traces its first run in each bucket."""

    def __init__(
        self,
        model: FxModel,
        own: dict[str, torch.Tensor],
        buckets: Sequence[Bucket],
        applied: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.model, self.own, self.buckets, self.applied = model, own, buckets, applied
        # A size of 1 is special to torch.
        self._sizes = next((b for b in buckets if 1 not in b.sizes), buckets[0]).sizes
        self._traces: dict[Bucket, Trace] = {}

    @property
    def symbols(self) -> dict[str, int]:
        return self.model.dynamic.symbols(self._sizes)

    def outputs(self, batch: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the model's outputs for a batch, at the sizes of `symbols`."""
        return self.run(Bucket(batch, self._sizes), inputs)

    def run(self, bucket: Bucket, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the model's outputs in a bucket, at its largest shape. The first run is traced."""
        if bucket in self._traces:
            return run_model(self.model, self.own, inputs)
        self._traces[bucket], outputs = trace_model(self.model, self.own, bucket, inputs)
        return outputs

    def trace(self, bucket: Bucket, sizes: tuple[int, ...]) -> Trace:
        """Return the trace of a bucket's program at these sizes. Raises UnsupportedModel."""
        if sizes == bucket.sizes and bucket in self._traces:
            return self._traces[bucket]
        examples = example_inputs(self.model.inputs, bucket.batch, self.model.dynamic.symbols(sizes))
        try:
            return trace_model(self.model, self.own, bucket, examples)[0]
        except UnsupportedModel:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            at = f" and size {', '.join(map(str, sizes))}" if sizes else ""
            raise UnsupportedModel(
                f"{self.model.name}: does not run at batch {bucket.batch}{at}: {error}"
            ) from error


def own_storages(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights as dense tensors, each with its own storage; tied weights (same bytes and shape) share one."""
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
    raw = weights.dense_bytes(source)  # from_numpy creates a separate storage over the same bytes
    if raw.ctypes.data % source.element_size():
        raw = raw.copy()
    return torch.from_numpy(raw).view(source.dtype).as_strided(source.shape, source.stride())

"""Makes a repository entry: exports and lowers a `Subject`, and compares the result with eager PyTorch."""

import asyncio
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from cohabit.runtime.lowering.lower import Lowered
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.config.values import shape_buckets
from cohabit.server.deploy.lifecycle import open_placement
from cohabit.server.deploy.notices import random_ops, stored_words
from cohabit.server.deploy.options import WEIGHTS
from cohabit.server.deploy.prepare import DEFAULT_BATCHES, SHAPE_BUCKETS
from cohabit.server.engine.compute_lane import make_lanes
from cohabit.server.engine.servable import ProgramServable, array_of
from cohabit.server.errors import ImportFailed
from cohabit.server.importing.comparison import Different, EagerComparison
from cohabit.server.importing.exporting import export, save
from cohabit.server.importing.subject import ONE_TOKEN, Subject, Tensors
from cohabit.server.ipc.model import GENERATION, TOKENIZER, ModelInfo
from cohabit.server.protocol.datatypes import BINARY_ONLY, float32_of_bf16
from cohabit.server.protocol.embedding import embedding_output, scoring_output
from cohabit.server.protocol.tensors import MOST_JSON_VALUES
from cohabit.server.repository.scan import find, is_model_name
from cohabit.server.triton.config_fields import LENGTHS
from cohabit.server.triton.model_config import config_text
from cohabit.server.triton.sequences import rules_of, with_sequences

_PROGRAM, _CONFIG = "model.pt2", "config.pbtxt"
_LABELS = "labels.txt"
SAMPLE = "sample.json"
"""A valid request of one row, in KServe v2's JSON."""
_SAMPLE_DECIMALS = 3
_LOGITS = "logits"
_ROWS = (1, 2, 3)
"""Batch sizes to compare, besides the largest; a batch of 3 is padded."""
_UNLIMITED = FixedSize(1 << 50)


@dataclass(frozen=True, slots=True)
class ImportedEntry:
    """A new entry in a repository."""

    folder: Path
    info: ModelInfo
    archive_bytes: int
    weight_bytes: int
    memory_bytes: int
    """Device memory needed to keep the whole model resident."""
    errors: dict[int, float]
    """By batch size: the largest difference from eager PyTorch, relative to the output's largest value.

    For integer outputs, it is the fraction of elements that differ. Empty if the model draws random numbers. Errors
    over the tolerance are rounding, and listed in the notes.
    """
    notes: tuple[str, ...]

    @property
    def generates(self) -> bool:
        """Whether it is a language model that generates texts."""
        return (self.folder / GENERATION).is_file()

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / TOKENIZER).is_file()

    @property
    def embeds(self) -> bool:
        """Whether it makes vectors of texts."""
        return self.has_tokenizer and embedding_output(self.info) is not None

    @property
    def ranks(self) -> bool:
        """Whether it scores pairs of texts."""
        return self.has_tokenizer and scoring_output(self.info) is not None


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Destination of an entry: a version of a model in a repository."""

    repository: Path
    name: str
    version: int = 1
    replaces: bool = False
    """Whether the version may exist already."""

    @property
    def folder(self) -> Path:
        return self.repository / self.name

    @property
    def versions(self) -> list[int]:
        """The existing versions. They are kept, as is the entry's config.pbtxt."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal() and path.is_dir())

    def require(self) -> None:
        """Raise ImportFailed for an unusable name, or for an existing version."""
        if not is_model_name(self.name):
            raise ImportFailed(
                f"model name {self.name!r} is not usable; take letters, digits, '_', '-' and '.', 255 at most, for"
                " --name"
            )
        versions = self.versions
        if self.folder.exists() and not versions:
            raise ImportFailed(f"{self.folder} exists; give another --name, or remove it")
        if self.version in versions and not self.replaces:
            raise ImportFailed(
                f"{self.folder / str(self.version)} exists; --replace it, add --version {versions[-1] + 1}, or give"
                " another --name"
            )

    def put(self, written: Path) -> Path:
        """Move a folder written beside the entry into place, and return the entry's folder.

        In an existing entry, replaces the version's program in one step, and then other files such as `sample.json`.
        """
        self.require()
        if not self.versions:
            return written.rename(self.folder)
        version = self.folder / str(self.version)
        if version.exists():
            (written / str(self.version) / _PROGRAM).replace(version / _PROGRAM)
        else:
            (written / str(self.version)).rename(version)
        for name in (SAMPLE, TOKENIZER, GENERATION):
            if (written / name).is_file():
                (written / name).replace(self.folder / name)
        return self.folder


def write_entry(
    subject: Subject,
    place: EntryPlace,
    max_batch: int,
    config: ServeConfig,
    on_progress: Callable[[str], None],
    tolerance: float | None = None,
) -> ImportedEntry:
    """Write an entry atomically. `config` has the cache and the number of threads. Raises CohabitError.

    Outputs may differ from eager PyTorch's by `tolerance`; by default, by the rounding of the model's parameter types.
    The entry is loaded as on the first start of `cohabit serve`, which then measures and plans it in the background.
    """
    try:
        place.repository.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.repository, prefix=".import-") as staging:
            folder = Path(staging) / place.name
            on_progress("exporting")
            program = export(subject, max_batch)
            on_progress("writing the archive")
            save(program, folder / str(place.version) / _PROGRAM)
            del program  # its weights belong to the module, except those that export has added
            # The configuration of an existing entry applies to all its versions.
            if place.versions:
                if config.weights != "float32":
                    raise ImportFailed(
                        f"{place.folder} has a config.pbtxt, which says for all versions what weights are stored as;"
                        f" leave out --weights, and set its parameter '{WEIGHTS}'"
                    )
                _copy_configuration(place.folder, folder)
            # Only `place.put` changes the entry, after a successful comparison.
            loading = _loading(config, Path(staging), None if place.versions else max_batch)
            if subject.decoding is not None:
                loading = replace(loading, shape_buckets=shape_buckets(subject.decoding.shape_buckets))
            entry = asyncio.run(_compared(subject, folder, loading, on_progress, tolerance))
            notes = _write_sample(subject, entry.info, folder)
            if subject.tokenizer is not None:
                (folder / TOKENIZER).write_bytes(subject.tokenizer)
            if not place.versions:
                labels = _write_labels(subject, entry.info, folder)
                parameters = _parameters(subject, config)
                states = () if subject.decoding is None else subject.decoding.states
                text = config_text(entry.info, labels, subject.images, parameters, states)
                (folder / _CONFIG).write_text(text)
            if subject.decoding is not None:
                document = msgspec.json.format(msgspec.json.encode(subject.decoding.document))
                (folder / GENERATION).write_bytes(document + b"\n")
            source = find(folder)  # raises if the written files cannot be read
            info = entry.info
            if not info.sequences:  # it was loaded before config.pbtxt existed
                info = with_sequences(info, None if source.config is None else rules_of(source.config, info, {}))
            return replace(entry, info=info, folder=place.put(folder), notes=(*entry.notes, *notes))
    except OSError as error:
        raise ImportFailed(f"{place.folder} cannot be written: {error.strerror or error}") from error


def _parameters(subject: Subject, config: ServeConfig) -> dict[str, str]:
    """Parameters of a new config.pbtxt, for settings without a field."""
    pooling = {"pooling": subject.pooling} if subject.tokenizer is not None and subject.pooling is not None else {}
    decoding = subject.decoding
    if decoding is not None:
        pooling = {LENGTHS: decoding.lengths, SHAPE_BUCKETS: decoding.shape_buckets}
    return pooling | ({WEIGHTS: config.weights} if config.weights != "float32" else {})


def _copy_configuration(entry: Path, folder: Path) -> None:
    """Copy the files shared by an entry's versions; the new one is loaded with them, and refused on a mismatch."""
    for path in entry.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif not path.name.isdecimal():
            shutil.copytree(path, folder / path.name)


def _loading(config: ServeConfig, repository: Path, max_batch: int | None) -> ServeConfig:
    """Return settings that hold all of the model, and plan the batch sizes that its config.pbtxt leads to.

    `max_batch` is the maximum of a config.pbtxt that is still to be written; None if the entry has one.
    """
    planned = None
    if max_batch is not None and max_batch > 1:
        planned = tuple(sorted({b for b in DEFAULT_BATCHES if b < max_batch} | {max_batch}))
    return replace(
        config,
        repository=repository,
        memory=_UNLIMITED,
        layout="resident",
        engine="in-process",
        is_trial=True,
        batch_sizes=planned,
    )


async def _compared(
    subject: Subject,
    folder: Path,
    config: ServeConfig,
    on_progress: Callable[[str], None],
    tolerance: float | None,
) -> ImportedEntry:
    """Load the archive and compare its answers with eager PyTorch's. Raises CohabitError."""

    def progress(name: str, stage: str) -> None:
        on_progress(stage)

    lanes, sources = make_lanes(config.compute_lanes, config.queue_limit), [find(folder)]
    for lane in lanes:
        lane.start()
    placement, _ = open_placement(sources, config, lanes)
    try:
        models, failures = await placement.prepare(sources, progress)
        on_progress("loading all of it")
        failures |= await placement.place(models)
        for reason in failures.values():
            raise ImportFailed(reason)
        (model,) = models
        # An existing config.pbtxt may rename inputs.
        info = model.servable.info
        named, taken = {port.name for port in model.servable.inputs}, {given.name for given in subject.inputs}
        if named != taken:
            raise ImportFailed(
                f"the entry's config.pbtxt names the inputs {', '.join(sorted(named))}, the module takes"
                f" {', '.join(sorted(taken))}; give another --name"
            )
        # Rows and tolerance of the comparison.
        most = info.max_batch_size
        rows: Iterable[int] = info.only_batches or sorted({b for b in _ROWS if b < most} | {max(most, 1)})
        if random_ops(model.lowered):
            rows = ()
        else:
            on_progress("comparing with eager PyTorch")
        if model.lowered.encoding is not None:
            tolerance = math.inf  # its cosines measure its quality instead
        servable, outputs = model.servable, [port.name for port in model.servable.outputs]
        comparison = EagerComparison(subject, partial(_answer, servable), outputs, tolerance)

        def error(count: int, seed: int) -> float:
            try:
                return comparison.largest_error(subject.examples(count, seed), f"at batch {count}")
            except Different as different:
                limit = f"the limit is {comparison.tolerance:.0e} (--tolerance)"
                raise ImportFailed(f"{different}; {limit}. Nothing was written") from different

        errors = {count: error(count, count) for count in rows}
        # One token may be a special case in the program, if the sequence length is dynamic.
        if rows and subject.most_tokens and all(d.least == 1 for d in info.dynamic.dimensions):
            least = min(errors)
            errors[least] = max(errors[least], error(least, ONE_TOKEN))
        return ImportedEntry(
            folder,
            info,
            sources[0].path.stat().st_size,
            model.weight_bytes,
            placement.memory.taken_bytes,
            errors,
            (*subject.notes, *comparison.rounded, *_stored(model.lowered, comparison)),
        )
    finally:
        await asyncio.gather(*(lane.stop() for lane in lanes))
        placement.close()


def _answer(servable: ProgramServable, inputs: Tensors) -> list[torch.Tensor]:
    """Return a servable's outputs in order, for inputs of one batch."""
    arrays = {port.name: array_of(inputs[port.name]) for port in servable.inputs}
    rows = len(next(iter(arrays.values()))) if servable.info.max_batch_size else 1
    answered = servable.execute([arrays], rows).outputs
    return [
        torch.tensor(float32_of_bf16(array) if port.dtype is torch.bfloat16 else array)
        for port in servable.outputs
        for array in [answered[port.name]]
    ]


def _stored(lowered: Lowered, comparison: EagerComparison) -> tuple[str, ...]:
    """Return the size of the stored weights, and the loss of lossy ones on the examples."""
    if (words := stored_words(lowered)) is None:
        return ()
    if lowered.encoding is not None and comparison.cosines:
        words += f". On the examples, the least cosine with eager PyTorch's is {min(comparison.cosines):.5f}"
    return (words,)


def _write_labels(subject: Subject, info: ModelInfo, folder: Path) -> dict[str, str]:
    """Write the names of the classes, if an output has an element for each. Returns the file by output."""
    outputs = [spec.name for spec in info.outputs if spec.name == _LOGITS and spec.shape == (len(subject.classes),)]
    if outputs:
        (folder / _LABELS).write_text("".join(f"{name}\n" for name in subject.classes))
    return dict.fromkeys(outputs, _LABELS)


def _write_sample(subject: Subject, info: ModelInfo, folder: Path) -> tuple[str, ...]:
    """Write a valid request for clients to begin with. Returns why there is none, for the user."""
    if subject.decoding is not None:
        return ()
    inputs = subject.examples(min(info.only_batches, default=1), 0)
    binary = [spec.name for spec in info.inputs if spec.datatype in BINARY_ONLY]
    if binary:
        return (f"no {SAMPLE} was written: JSON cannot have {', '.join(binary)}, which clients send as bytes",)
    if any(tensor.numel() > MOST_JSON_VALUES for tensor in inputs.values()):
        return (f"no {SAMPLE} was written: one row of an input has more than {MOST_JSON_VALUES} numbers",)
    tensors = [
        {"name": spec.name, "datatype": spec.datatype, "shape": list(tensor.shape), "data": _numbers(tensor)}
        for spec in info.inputs
        for tensor in [inputs[spec.name]]
    ]
    (folder / SAMPLE).write_text(json.dumps({"inputs": tensors}) + "\n")
    return ()


def _numbers(tensor: torch.Tensor) -> list[float]:
    rounded = tensor.double().round(decimals=_SAMPLE_DECIMALS) if tensor.is_floating_point() else tensor
    numbers: list[float] = rounded.flatten().tolist()
    return numbers

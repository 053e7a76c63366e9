"""`cohabit import`: makes a repository entry of a Hugging Face model, a torch.nn.Module or a checkpoint."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cohabit.planner.errors import format_bytes
from cohabit.server.commands.flags import IMPORTING
from cohabit.server.config.sizes import write_size
from cohabit.server.config.sources import config_of
from cohabit.server.errors import ConfigError
from cohabit.server.format import tensor_table

if TYPE_CHECKING:
    from cohabit.server.importing.entry import ImportedEntry
    from cohabit.server.importing.subject import Subject

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.\-]+")
_MIB = 1 << 20


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Import a model and print what it became. Raises ImportFailed and what else loading raises."""
    name = options.name or _default_name(options)
    with errors.status(Text(f"{name}: starting torch")) as status:
        from cohabit.server.importing.entry import refuse_name, write_entry

        def progress(stage: str) -> None:
            status.update(Text(f"{name}: {stage}"))
            if not errors.is_terminal:
                errors.print(f"{name}: {stage}", markup=False, soft_wrap=True)

        refuse_name(options.repository, name)
        subject = _subject(options, progress)
        given = {key: vars(options)[key] for key in IMPORTING if key in vars(options)}
        config = config_of({"repository": str(options.repository), "memory": "1B", **given})
        entry = write_entry(subject, options.repository, name, options.max_batch, config, progress)
    _show(entry, options.repository, out)
    return 0


def _default_name(options: argparse.Namespace) -> str:
    path = Path(options.path)
    if path.exists():
        name = path.resolve().name if path.is_dir() else path.stem
    else:
        name = str(options.path).rpartition(":")[2]
    return _UNUSUAL.sub("_", name).lstrip("-.")


def _subject(options: argparse.Namespace, on_progress: Callable[[str], None]) -> "Subject":
    from cohabit.server.importing.factory import from_factory
    from cohabit.server.importing.huggingface import from_folder, is_folder

    path = Path(options.path)
    if options.sequence_length is not None and not path.is_dir():
        raise ConfigError("--sequence-length is for Hugging Face models; give the dimensions with --input")
    on_progress(f"loading {options.path}")
    if options.factory is not None:
        if not _FACTORY.fullmatch(options.factory):
            raise ConfigError(f"--factory: '{options.factory}' is not MODULE:FUNCTION")
        if not path.is_file():
            raise ConfigError(f"{path} is no checkpoint file, which is what --factory's module would load")
        return from_factory(options.factory, options.inputs, path)
    if path.is_dir():
        if not is_folder(path):
            raise ConfigError(f"{path} is no Hugging Face model directory: it has no config.json")
        return from_folder(path, options.inputs, options.sequence_length)
    if path.is_file():
        raise ConfigError(f"{path} is a checkpoint; name the function that makes its module with --factory")
    if not _FACTORY.fullmatch(options.path):
        raise ConfigError(f"{path} does not exist; give a folder, a checkpoint, or MODULE:FUNCTION")
    return from_factory(options.path, options.inputs)


def _show(entry: "ImportedEntry", repository: Path, out: Console) -> None:
    from cohabit.server.importing.entry import SAMPLE

    out.print(f"{entry.folder}: {format_bytes(entry.archive_bytes)}, {format_bytes(entry.weight_bytes)} of weights")
    out.print(tensor_table(entry.info))
    if entry.errors:
        batches = f" at batch {', '.join(map(str, entry.errors))}" if entry.info.max_batch_size else ""
        unit = "an output's largest value"
        if any(spec.datatype.startswith(("INT", "UINT", "BOOL")) for spec in entry.info.outputs):
            unit += ", or of the elements of integers,"
        out.print(f"largest difference from eager PyTorch: {max(entry.errors.values()):.1e} of {unit}{batches}")
    else:
        out.print("not compared with eager PyTorch: the model draws random numbers")
    if entry.info.only_batches:
        only = ", ".join(map(str, entry.info.only_batches))
        out.print(f"note: rows influence one another, so requests run alone, in batches of {only}")
    for note in entry.notes:
        out.print(f"note: {note}", soft_wrap=True)
    if (entry.folder / SAMPLE).is_file():
        url = f"localhost:8000/v2/models/{entry.info.name}/infer"
        out.print(f"a request that it takes: curl {url} --data-binary @{entry.folder / SAMPLE}", soft_wrap=True)
    needed = write_size(-(-entry.memory_bytes // _MIB) * _MIB)
    out.print(f"serve it with: cohabit serve {repository} --memory {needed}")
    out.print(f"in less memory: cohabit check {entry.folder}")

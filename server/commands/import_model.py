"""`cohabit import`: makes a repository entry of a Hugging Face or ONNX model, a torch.nn.Module or a checkpoint."""

import argparse
import glob
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

from cohabit.planner.compiled import interpreted
from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.server.commands import EXIT_FAILED
from cohabit.server.config.config import BY_KEY
from cohabit.server.config.sizes import write_size
from cohabit.server.config.sources import add_flag, config_of, given, typed
from cohabit.server.config.values import LARGEST_BATCH, integer
from cohabit.server.errors import ConfigError, ImportFailed
from cohabit.server.format import tensor_table
from cohabit.server.importing.declared_input import largest_size, parse_input
from cohabit.server.importing.folder_files import cached_folder
from cohabit.server.importing.model_files import (
    ADAPTER_CONFIG,
    is_model_folder,
    onnx_file,
    require_checkpoint,
    require_whole,
)
from cohabit.server.script import require_script

if TYPE_CHECKING:
    from cohabit.server.importing.entry import ImportedEntry
    from cohabit.server.importing.subject import Subject

_FACTORY = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*")
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.\-]*/)?[A-Za-z0-9][\w.\-]*", re.ASCII)
_FILES = (".bin", ".ckpt", ".onnx", ".pt", ".pt2", ".pth", ".py", ".safetensors")
"""Suffixes of names that mean files, not models of the hub."""
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.\-]+")
_MIB = 1 << 20


_EXAMPLES = """examples:
  cohabit import ~/bert-base-uncased
  cohabit import ~/vit-base --repository models --name classifier
  cohabit import ~/clip-vit-base-patch32 --outputs image_embeds,text_embeds
  cohabit import ~/SmolLM2-135M-Instruct --max-batch 4 --max-sequence-length 1024
  cohabit import ~/whisper-tiny --architecture WhisperEncoder
  cohabit import models/ranker.py:make_ranker --input features:FP32:-1,256
  cohabit import mypackage.models:make_ranker --input features:FP32:-1,256 --input categories:INT64:-1,4
  cohabit import steps.py:crop --input image:FP32:-1,3,64,64 --input boxes:FP32:-1,4,4
  cohabit import sentence-transformers/all-MiniLM-L6-v2
  cohabit import detector.onnx --input images:FP32:-1,3,640,640
  cohabit import run.ckpt --key ema.model --factory mypackage.models:make_encoder --input tokens:INT64:-1,-1
  cohabit import ranker.safetensors --factory mypackage.models:make_ranker
  cohabit import ~/tuned --repository models
  cohabit import ~/tuned/support-* --max-sequence-length 128
  cohabit import ~/adapters/spam --base ~/bert-base-uncased

Importing runs code: that of MODULE and of what it imports, or of the installed transformers. Code in a model
directory is never run, and pickles may hold tensors only. Import what you would run.
"""
_ONE_LENGTH = 64
"""Default length, in tokens, of models whose length cannot be dynamic: each token adds operators."""
_SETTINGS = ("cache", "threads", "weights")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Export a model with a dynamic batch, compare it with eager PyTorch, or an ONNX model with ONNX Runtime, and\n"
        "write it to a model repository with its configuration. The entry of a causal language model generates texts.\n"
        "Importing runs a model's code."
    )
    parser.epilog = _EXAMPLES
    # What to import.
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="folders of models, or models: a Hugging Face model directory (config.json and safetensors), the hub's"
        " name of a model in the local"
        " Hugging Face cache (hf download NAME), an ONNX file or a folder with model.onnx, MODULE:FUNCTION or"
        " FILE.py:FUNCTION that returns a torch.nn.Module or is itself a function of tensors, or a checkpoint of"
        " --factory. A LoRA adapter's folder of peft is merged with its base",
    )
    parser.add_argument(
        "--base",
        metavar="PATH",
        help="folder or hub's name of the base of LoRA adapters (default: as in their adapter_config.json)",
    )
    parser.add_argument(
        "--factory",
        metavar="MODULE:FUNCTION",
        help="function that returns the module into which a checkpoint is loaded: safetensors, or a state_dict of"
        " torch.save",
    )
    parser.add_argument(
        "--key",
        metavar="KEY",
        help="key of the state_dict in a larger checkpoint, such as model or ema.model (default: state_dict)",
    )
    # Its inputs, outputs and sizes.
    parser.add_argument(
        "--input",
        dest="inputs",
        type=typed(parse_input),
        action="append",
        default=[],
        metavar="NAME:TYPE:DIMS",
        help="input of the module, such as image:FP32:-1,3,224,224, where the first -1 is the batch and any other a"
        " dynamic dimension; repeatable (default: the module's `example_inputs`, or what the Hugging Face or ONNX model"
        " takes)",
    )
    parser.add_argument(
        "--sequence-length",
        type=typed(integer(1, 1 << 20)),
        metavar="N",
        help="export a text model for sequences of N tokens only, or a speech model for N samples",
    )
    parser.add_argument(
        "--max-sequence-length",
        type=typed(integer(1, 1 << 20)),
        metavar="N",
        help="largest dynamic sequence length of a text model (default: the model's positions, or its tokenizer's; at"
        " most 2048 for a causal language model), or size of the dynamic dimensions of --input (default: 512)",
    )
    parser.add_argument(
        "--architecture",
        metavar="CLASS",
        help="class of transformers to load a Hugging Face model as, or the class of one of its parts, such as"
        " CLIPTextModelWithProjection or WhisperEncoder (default: as in its config.json)",
    )
    parser.add_argument(
        "--outputs",
        type=lambda text: tuple(name for name in text.split(",") if name),
        default=(),
        metavar="NAME,...",
        help="outputs of a Hugging Face or ONNX model to keep, in this order (default: all that have one row per input"
        " row); with logits, a causal language model answers whole texts instead of generating them",
    )
    parser.add_argument(
        "--max-batch",
        type=typed(integer(1, LARGEST_BATCH)),
        default=8,
        metavar="N",
        help="largest batch size; 1 exports a fixed batch (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=typed(_tolerance),
        metavar="SHARE",
        help="largest difference from eager PyTorch or ONNX Runtime, as a share of an output's largest value (default:"
        " 1e-4; 1e-2 with parameters in float16, 5e-2 in bfloat16). Above it, a comparison with float64 tells rounding"
        " from error",
    )
    # Where to write it.
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path("models"),
        metavar="DIR",
        help="the model repository (default: ./%(default)s)",
    )
    parser.add_argument("--name", metavar="NAME", help="the entry's name (default: from PATH)")
    parser.add_argument(
        "--version",
        type=typed(integer(1, 10**18 - 1)),
        default=1,
        metavar="N",
        help="the version to write; an existing entry keeps its other versions and its config.pbtxt (default:"
        " %(default)s)",
    )
    parser.add_argument("--replace", action="store_true", help="replace the version, if the entry has it")
    for key in _SETTINGS:
        add_flag(parser, BY_KEY[key])


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Import models and print their entries, a line for each if there are several.

    Raises ImportFailed, and other errors of loading. Of several models, those that fail are named at the end.
    """
    given_paths = [path for text in options.paths for path in _models_in(text)]
    every = [argparse.Namespace(**vars(options) | {"path": path}) for path in given_paths]
    for one in every:
        one.name = options.name or _default_name(one)
    if len(every) > 1:
        if options.name is not None:
            raise ConfigError("--name is for one model; entries of several models have the names of their folders")
        return _import_all(every, out, errors)
    (one,) = every
    _require_source(one)
    with errors.status(Text(f"{one.name}: starting torch")) as status:

        def progress(stage: str) -> None:
            status.update(Text(f"{one.name}: {stage}"))
            if not errors.is_terminal:
                errors.print(f"{one.name}: {stage}", markup=False, soft_wrap=True)

        entry = _imported(one, progress)
    _show(entry, one.repository, out)
    return 0


def _models_in(text: str) -> list[str]:
    """Return the models in a folder that is not a model itself, or that a pattern matches; else the path as it is."""
    path = Path(text)
    if glob.has_magic(text) and not path.exists():
        return [model for found in sorted(glob.glob(text)) for model in _models_in(found)] or [text]
    if not path.is_dir() or is_model_folder(path):
        return [text]
    found = [str(folder) for folder in sorted(path.iterdir()) if folder.is_dir() and is_model_folder(folder)]
    return found or [text]


def _import_all(every: Sequence[argparse.Namespace], out: Console, errors: Console) -> int:
    """Import several models, with a line for each, and name those that failed at the end. Returns the exit status."""
    _require_own_names(every)
    failed: dict[str, str] = {}
    with Progress(*Progress.get_default_columns(), console=errors, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(every))
        for one in every:

            def progress(stage: str, name: str = one.name) -> None:
                bar.update(task, description=escape(f"{name}: {stage}"))

            try:
                _require_source(one)
                entry = _imported(one, progress)
            except (CohabitError, OSError) as error:
                failed[one.name] = str(error)
                out.print(f"{one.name}: failed", markup=False)
            else:
                largest = f", {max(entry.errors.values()):.1e} from {entry.compared_with}" if entry.errors else ""
                out.print(f"{entry.folder}: {format_bytes(entry.weight_bytes)} of weights{largest}", markup=False)
            bar.advance(task)
    out.print(
        f"{len(every) - len(failed)} of {len(every)} models imported; serve: cohabit serve {every[0].repository}"
    )
    for name, reason in failed.items():
        errors.print(f"{name}: {reason}", markup=False, soft_wrap=True)
    return EXIT_FAILED if failed else 0


def _require_own_names(every: Sequence[argparse.Namespace]) -> None:
    """Raise ConfigError if several models would have the same entry."""
    paths: dict[str, str] = {}
    for one in every:
        if (other := paths.setdefault(one.name, one.path)) is not one.path:
            raise ConfigError(
                f"{other} and {one.path} would both be the entry '{one.name}'; import them one by one, with --name"
            )


def _imported(options: argparse.Namespace, on_progress: Callable[[str], None]) -> "ImportedEntry":
    path = _folder_of(options)
    if options.factory is None and (model := onnx_file(path)) is not None:
        _require_onnx(model, options)
        path = model
    # The trial load has one plan, with everything resident: compiling the planner for it would take half a minute.
    with interpreted(), ExitStack() as stack:
        from cohabit.server.importing.entry import EntryPlace, write_entry
        from cohabit.server.importing.exporting import OneLengthOnly

        place = EntryPlace(options.repository, options.name, options.version, options.replace)
        place.require()
        settings = given(options, _SETTINGS)
        config = config_of({"repository": str(options.repository), "memory": "1B", **settings})
        if (path / ADAPTER_CONFIG).is_file() and options.factory is None:
            from cohabit.server.importing.adapter import base_of, merge

            base = base_of(path, options.base)
            on_progress(f"merging it with {base}")
            merged = Path(stack.enter_context(TemporaryDirectory(prefix="cohabit-merged-")))
            merge(path, base, merged)
            path = merged

        def write(subject: "Subject") -> "ImportedEntry":
            return write_entry(subject, place, options.max_batch, config, on_progress, options.tolerance)

        try:
            return write(_subject(path, options, on_progress))
        except OneLengthOnly:
            options.sequence_length, options.max_sequence_length = options.max_sequence_length or _ONE_LENGTH, None
            note = (
                f"the model is exported for sequences of {options.sequence_length} tokens only, because it has a loop"
                " over them; clients pad to that, and --sequence-length chooses otherwise"
            )
            subject = _subject(path, options, on_progress)
            return write(replace(subject, notes=(*subject.notes, note)))


def _tolerance(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise ValueError(f"'{text}' is out of range; a tolerance lies between 0 and 1")
    return share


def _default_name(options: argparse.Namespace) -> str:
    path = Path(options.path)
    if path.name == "model.onnx":  # its folder has the model's name
        path = path.resolve().parent
        path = path.parent if path.name == "onnx" else path
    if path.exists():
        name = path.resolve().name if path.is_dir() else path.stem
    else:
        name = re.split("[:/]", str(options.path))[-1]
    return _UNUSUAL.sub("_", name).lstrip("-.")


def _subject(path: Path, options: argparse.Namespace, on_progress: Callable[[str], None]) -> "Subject":
    from cohabit.server.importing.factory import from_factory
    from cohabit.server.importing.huggingface import from_folder, is_folder
    from cohabit.server.importing.huggingface_inputs import Lengths

    most = options.max_sequence_length
    on_progress(f"loading {options.path}")
    if options.factory is not None:
        return from_factory(options.factory, options.inputs, path, options.key, most)
    if path.suffix == ".onnx":
        from cohabit.server.importing.onnx.source import from_onnx

        return from_onnx(path, options.inputs, most, options.outputs)
    if not path.is_dir():
        return from_factory(options.path, options.inputs, most=most)
    if not is_folder(path):
        raise ConfigError(f"{path} is not a model directory: it has neither config.json nor model.onnx")
    lengths = Lengths(options.sequence_length, most)
    return from_folder(path, options.inputs, lengths, options.architecture, options.outputs)


def _require_source(options: argparse.Namespace) -> None:
    """Raise ConfigError or ImportFailed if PATH and the flags cannot be imported, before torch is imported."""
    path = Path(options.path)
    if options.sequence_length is not None and options.max_sequence_length is not None:
        raise ConfigError("--sequence-length and --max-sequence-length contradict one another; give one of them")
    if options.key is not None and options.factory is None:
        raise ConfigError("--key is for checkpoints: name the function that makes the module with --factory")
    function = options.path if options.factory is None else options.factory
    # With --factory, PATH is a checkpoint; else PATH's kind says how it is loaded.
    if options.factory is not None:
        if not _FACTORY.fullmatch(options.factory):
            raise ConfigError(f"--factory: '{options.factory}' is not MODULE:FUNCTION")
        if not path.is_file():
            raise ConfigError(f"{path} is not a checkpoint file, which --factory needs")
        require_checkpoint(path)
    elif onnx_file(path) is not None:
        return
    elif path.is_dir():
        for weights in sorted(path.glob("*.safetensors")):
            if weights.is_file():
                require_whole(weights)
        return
    elif path.is_file():
        require_checkpoint(path)
        raise ConfigError(f"{path} is a checkpoint; name the function that makes its module with --factory")
    elif not _FACTORY.fullmatch(options.path):
        if path.suffix not in _FILES and _HUB_NAME.fullmatch(options.path):
            return
        raise ConfigError(
            f"{path} does not exist; give a folder, a hub's name, a checkpoint, MODULE:FUNCTION or FILE.py:FUNCTION"
        )
    _refuse_flags_of_folders(options)
    if function.rpartition(":")[0].endswith(".py"):
        require_script(function)
    else:
        _require_package(function)


def _require_package(function: str) -> None:
    """Raise ImportFailed if the package of MODULE:FUNCTION is missing."""
    package = function.partition(":")[0].partition(".")[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if package not in sys.modules and find_spec(package) is None:
        raise ImportFailed(
            f"{function}: no module named '{package}', neither installed nor in this folder; run the command where its"
            " package is, or set PYTHONPATH"
        )


def _folder_of(options: argparse.Namespace) -> Path:
    """Return the path to import; for a hub's name, its folder in the local cache. Raises ImportFailed."""
    path = Path(options.path)
    is_file = path.suffix in _FILES or options.factory is not None
    if path.exists() or is_file or not _HUB_NAME.fullmatch(options.path):
        return path
    return cached_folder(options.path)


def _require_onnx(path: Path, options: argparse.Namespace) -> None:
    """Raise ConfigError or ImportFailed if an ONNX file cannot be imported with the given flags."""
    if find_spec("onnx") is None:
        raise ImportFailed(f"{path}: ONNX models need the package onnx; pip install 'cohabit[onnx]'")
    for flag, value in (("--sequence-length", options.sequence_length), ("--architecture", options.architecture)):
        if value is not None:
            raise ConfigError(
                f"{flag} is for Hugging Face models; set sizes of an ONNX model's inputs with --input"
            )


def _refuse_flags_of_folders(options: argparse.Namespace) -> None:
    if options.sequence_length is not None:
        raise ConfigError("--sequence-length is for Hugging Face models; give the dimensions with --input")
    if options.max_sequence_length is not None and not largest_size(options.inputs, None):
        raise ConfigError("--max-sequence-length: no input has a dynamic dimension; declare one as -1 with --input")
    for flag, value in (("--architecture", options.architecture), ("--outputs", options.outputs)):
        if value:
            raise ConfigError(f"{flag} is for Hugging Face models; let the function return what is to be imported")


def _show(entry: "ImportedEntry", repository: Path, out: Console) -> None:
    from cohabit.server.importing.entry import SAMPLE

    out.print(f"{entry.folder}: {format_bytes(entry.archive_bytes)}, {format_bytes(entry.weight_bytes)} of weights")
    out.print(tensor_table(entry.info))
    if entry.errors:
        batches = f" at batch {', '.join(map(str, entry.errors))}" if entry.info.max_batch_size else ""
        unit = "an output's largest value"
        if any(spec.datatype.startswith(("INT", "UINT", "BOOL")) for spec in entry.info.outputs):
            unit += ", or of the elements of integers,"
        out.print(
            f"largest difference from {entry.compared_with}: {max(entry.errors.values()):.1e} of {unit}{batches}"
        )
    else:
        out.print(f"not compared with {entry.compared_with}: the model draws random numbers")
    if entry.info.only_batches:
        only = ", ".join(map(str, entry.info.only_batches))
        out.print(f"note: rows influence one another, so requests run alone, in batches of {only}")
    for note in entry.notes:
        out.print(f"note: {note}", soft_wrap=True)
    if (entry.folder / SAMPLE).is_file():
        url = f"localhost:8000/v2/models/{entry.info.name}/infer"
        out.print(f"a request that it takes: curl {url} --data-binary @{entry.folder / SAMPLE}", soft_wrap=True)
    if entry.generates:
        prompt = '"Once upon a time"' if entry.has_tokenizer else "[1, 2, 3]"
        body = f'{{"model": "{entry.info.name}", "prompt": {prompt}}}'
        out.print(f"a text that goes on: curl localhost:8000/v1/completions --data '{body}'", soft_wrap=True)
    elif entry.embeds:
        body = f'{{"model": "{entry.info.name}", "input": "some text"}}'
        out.print(f"a text's embedding: curl localhost:8000/v1/embeddings --data '{body}'", soft_wrap=True)
    elif entry.ranks:
        body = f'{{"model": "{entry.info.name}", "query": "a question", "documents": ["a text", "another one"]}}'
        out.print(f"documents in order: curl localhost:8000/v1/rerank --data '{body}'", soft_wrap=True)
    out.print(f"serve it with: cohabit serve {repository}")
    needed = write_size(-(-entry.memory_bytes // _MIB) * _MIB)
    out.print(
        f"all of it takes {needed} of device memory, beside what other models take; what less costs: cohabit check"
        f" {entry.folder}",
        soft_wrap=True,
    )

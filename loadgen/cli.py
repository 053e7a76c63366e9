"""The command line: `loadgen [options]` runs a load; `prepare` and `sentences` are commands beside it."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from loadgen.errors import LoadgenError, UsageError
from loadgen.options import prepare_parser, run_parser, sentences_parser

if TYPE_CHECKING:
    from loadgen.report import Report
    from loadgen.run import Load

_T = TypeVar("_T")

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 if every request was answered, 1 if not, 2 for an impossible command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(arguments[0]) if arguments else None
    errors = Console(stderr=True)
    try:
        return command(arguments[1:]) if command else _run(arguments)
    except UsageError as error:
        errors.print(f"loadgen: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_USAGE
    except LoadgenError as error:
        errors.print(f"loadgen: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("loadgen: interrupted")
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE


def _run(argv: Sequence[str]) -> int:
    options = run_parser().parse_args(argv)
    load = load_of(options)
    console = Console()
    repository = None if options.url else _repository(options, Console(stderr=True))
    report = _async(lambda: _measure(options, load, repository))

    import msgspec

    from loadgen.display import print_report

    print_report(report, console)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0 if report.all_answered else EXIT_FAILED


def load_of(options: argparse.Namespace) -> "Load":
    """Turn the options of a run into a Load; raises UsageError where they contradict each other."""
    from loadgen.run import Load

    if options.model and options.zipf:
        raise UsageError("--zipf and --model contradict each other; give weights as --model NAME=WEIGHT,...")
    if options.models and options.model and options.models != len(options.model):
        raise UsageError(f"--models {options.models}, but --model names {len(options.model)}")
    if options.url and (options.repository or options.memory or options.layout):
        raise UsageError("--repository, --memory and --layout are for a server started here; leave out --url")
    if options.json and not options.json.parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no folder {options.json.parent}")
    return Load(
        rate_per_s=options.rate,
        duration_s=options.duration,
        models=options.models if options.models or options.url or options.repository else 16,
        weights=options.model,
        zipf=options.zipf,
        seed=options.seed,
        batch=options.batch,
        slo_s=options.slo_ms / 1e3,
        timeout_s=options.timeout,
        warmup_s=options.warmup,
        max_in_flight=options.max_in_flight,
    )


async def _measure(options: argparse.Namespace, load: "Load", repository: Path | None) -> "Report":
    from loadgen.run import run_load

    if repository is None:
        return await run_load(options.url, load)

    from loadgen.serve import running_server, server_command
    from loadgen.sizes import in_mib, parse_memory, repository_weight_bytes

    weights_bytes = repository_weight_bytes(repository)
    memory_bytes = parse_memory(options.memory or "25%", weights_bytes)
    kib = -(-memory_bytes // 1024)
    command = server_command(options.server, repository, f"{kib}KiB", options.layout)
    console = Console(stderr=True)
    sizes = f"{in_mib(weights_bytes)} of weights in {in_mib(memory_bytes)} of memory"
    console.print(f"{repository}: {sizes}", soft_wrap=True, highlight=False)
    with console.status("") as status:
        server = running_server(command, options.patience, lambda text: status.update(text))
        async with server as url:
            status.stop()
            return await run_load(url, load)


def _repository(options: argparse.Namespace, console: Console) -> Path:
    """Return the repository to serve, which is written first if the user gave none."""
    if options.repository is not None:
        if not any(options.repository.glob("*/*/model.pt2")):
            raise UsageError(f"--repository {options.repository}: no NAME/VERSION/model.pt2 in it")
        return Path(options.repository)
    from loadgen.preparation import prepare_visibly
    from loadgen.prepare import recipes

    count = options.models or 16
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    repository = cache / "cohabit" / f"loadgen-{count}-seed{options.seed}"
    prepare_visibly(repository, recipes(count, seed=options.seed), force=False, console=console)
    return repository


def _prepare(argv: Sequence[str]) -> int:
    from loadgen.preparation import prepare_visibly, print_repository, print_zoo
    from loadgen.prepare import recipes

    parser = prepare_parser()
    options = parser.parse_args(argv)
    console = Console()
    if options.list:
        print_zoo(console)
        return 0
    if options.repository is None:
        parser.error("give the folder to write, or --list")
    count = options.models or len(options.zoo) or 16
    chosen = recipes(count, options.zoo, options.seed)
    prepared = prepare_visibly(options.repository, chosen, options.force, Console(stderr=True))
    print_repository(options.repository, prepared, console)
    return 0


def _sentences(argv: Sequence[str]) -> int:
    from loadgen.sentences import EXAMPLES, embed, print_similarities

    options = sentences_parser().parse_args(argv)
    sentences = options.sentence or EXAMPLES
    embeddings = _async(lambda: embed(options.url, options.model, sentences, options.timeout))
    print_similarities(sentences, embeddings, Console())
    return 0


def _async(make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine to its end; SIGTERM ends it as Ctrl-C does, so that a server is stopped either way."""
    import uvloop

    async def with_sigterm() -> _T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await make()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(with_sigterm())


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"prepare": _prepare, "sentences": _sentences}

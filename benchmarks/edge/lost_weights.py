"""A weights file that is renamed, cut off, or on a failing disk, under load: what its model answers, and another one.

Two models are served from a bundle, with parameters on flash. The weights of one lie on a disk of their own, an image
on a loop device. Every answer is compared, bit by bit, with the model's answer before the first fault. Needs root.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.edge.cgroup import EXIT_UNAVAILABLE, MIB, bundle_of, serve_bundle_command
from benchmarks.faults import ANSWERED, PATIENCE_S, Outcome, Question, load, questions
from benchmarks.record import markdown_table, parser_of, publish
from cohabit.loadgen.server_process import running_server
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.server.config.bundle import read_bundle

MODELS, MEMORY = ("mobilenet_v2_00", "mobilenet_v2_01"), "16MiB"
"""The first is the one whose weights are lost."""


class Medium:
    """A disk with one weights file, and what can happen to it."""

    def __init__(self, weights: Path, image: Path) -> None:
        self._weights, self._image = weights, image
        self._away, self._copy = weights.with_suffix(".away"), image.with_suffix(".copy")
        self._bytes = weights.read_bytes()

    def leave(self) -> None:
        """Change nothing."""

    def rename(self) -> None:
        self._weights.rename(self._away)

    def rename_back(self) -> None:
        self._away.rename(self._weights)

    def cut_off(self) -> None:
        os.truncate(self._weights, len(self._bytes) // 2)

    def write_back(self) -> None:
        self._weights.write_bytes(self._bytes)
        os.sync()

    def fail(self) -> None:
        """Take the image's blocks away, so that every read fails."""
        shutil.copyfile(self._image, self._copy)
        os.truncate(self._image, 0)

    def work_again(self) -> None:
        with self._copy.open("rb") as copy, self._image.open("r+b") as image:
            shutil.copyfileobj(copy, image)


PHASES: tuple[tuple[str, Callable[[Medium], None], bool], ...] = (
    # what is done to the file, and whether its model must answer every request then
    ("as it was written", Medium.leave, True),
    ("every read of the disk fails", Medium.fail, False),
    ("the disk works again", Medium.work_again, True),
    ("renamed, while the server has it open", Medium.rename, True),
    ("renamed back", Medium.rename_back, True),
    ("cut off at its half", Medium.cut_off, False),
    ("written again", Medium.write_back, True),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if os.geteuid():
        console.print("mounting a disk image needs root")
        return EXIT_UNAVAILABLE
    folder = options.folder / "edge"
    prepare_visibly(folder / "pair", recipes(len(MODELS), ["mobilenet_v2"]), force=False, console=console)
    exported = bundle_of(folder / "pair", MEMORY, folder, console)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bundle = Path(scratch) / "bundle"
        shutil.copytree(exported, bundle)
        with disk_of(bundle, MODELS[0], Path(scratch) / "disk.img") as medium:
            found = asyncio.run(_measure(bundle, medium, options.rate, options.seconds))
    held, sections = _sections(found, options)
    publish(options, "A weights file is lost under load", sections)
    return 0 if held else 1


@contextmanager
def disk_of(bundle: Path, model: str, image: Path) -> Iterator[Medium]:
    """Move a model's weights to a file system of their own, which is mounted where they were."""
    archive = next(m.archive for m in read_bundle(bundle).models if m.name == model)
    (weights,) = (bundle / "cache" / "weights").glob(f"{archive[:32]}*/weights-*.bin")
    original = weights.parent.rename(image.with_suffix(".files"))
    weights.parent.mkdir()
    nbytes = sum(path.stat().st_size for path in original.iterdir())
    image.touch()
    os.truncate(image, 2 * nbytes + 32 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop,noatime", image, weights.parent], check=True)
    try:
        shutil.copytree(original, weights.parent, dirs_exist_ok=True)
        os.sync()
        yield Medium(weights, image)
    finally:
        subprocess.run(["umount", "-l", weights.parent], check=True)


async def _measure(
    bundle: Path, medium: Medium, rate: float, seconds: float
) -> list[tuple[str, dict[str, Outcome]]]:
    """Serve the bundle, and let every phase last for some seconds."""
    async with running_server(serve_bundle_command(bundle), PATIENCE_S) as url:
        asked = {model: await asyncio.to_thread(questions, url, [model]) for model in MODELS}
        found = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
            for title, change, _ in PHASES:
                await asyncio.to_thread(change, medium)
                found.append((title, await _phase(session, asked, rate, seconds)))
    return found


async def _phase(
    session: aiohttp.ClientSession, asked: Mapping[str, Sequence[Question]], rate: float, seconds: float
) -> dict[str, Outcome]:
    """Send requests at random times to both models; return what became of them."""
    stop, found = asyncio.Event(), {model: Outcome() for model in asked}
    senders = [asyncio.create_task(load(session, asked[model], rate, found[model], stop)) for model in asked]
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.gather(*senders)
    return found


def _sections(
    found: Sequence[tuple[str, Mapping[str, Outcome]]], options: argparse.Namespace
) -> tuple[bool, list[str]]:
    rows, reasons, held = [], set[str](), True
    for (title, by_model), (_, _, answers) in zip(found, PHASES, strict=True):
        lost, other = (by_model[model] for model in MODELS)
        held &= other.outcomes.keys() <= {ANSWERED}
        held &= lost.outcomes.keys() <= {ANSWERED} if answers else "error 500" in lost.outcomes
        held &= lost.outcomes.keys() <= {ANSWERED, "error 500"}
        rows.append([title, _shown(lost), _shown(other)])
        reasons |= {f"- {title}: `{text}`" for text, _ in lost.errors.most_common(1)}
    return held, [
        f"Two models with {MEMORY}, from a bundle, with `--engine in-process`; {options.rate:g} requests/s to each at"
        f" random times for {options.seconds:g} s per row, over HTTP. The file is that of the first model. Answers are"
        " compared, bit by bit, with those before the first row.\n",
        markdown_table(["the weights file", "its model", "the other model"], rows),
        "\n".join(["The most frequent reason of each row:\n", *sorted(reasons), ""]),
        "To hold: the other model answers every request, and so does the first while its file is whole; its errors have"
        f" the reason. {'It does' if held else 'It does NOT'}.\n",
    ]


def _shown(found: Outcome) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in found.outcomes.most_common())


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.edge.lost_weights", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=10.0, help="requests per second and model (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

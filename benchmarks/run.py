"""Runs benchmarks by the names of their result files, one after the other; each writes its file."""

import argparse
import fnmatch
import shlex
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.edge.cgroup import EXIT_UNAVAILABLE

COMMANDS = {
    "demo": "demo --record",
    "figure8": "figure8 --record",
    "overload": "overload --record",
    "faults": "faults --record",
    "worst-bodies": "worst_bodies --record",
    "scale": "scale --rate 20 --seconds 40 --kills 20 --record",
    "scale-large": "scale --entry minilm_short --models 4 --memory 100MiB --resident-models 1 --rate 6 --seconds 20"
    " --kills 0 --record --record-as scale-large",
    "soak": "soak --minutes 20 --record",
    "lanes": "lanes --record",
    "frontend": "frontend --record",
    "peers": "peers --models resnet50 mobilenet_v2 vit_small minilm bert_small lstm ranker convnextv2_pico swin_small"
    " yolox_nano deberta_v3_reranker qwen3_prefill conformer_ctc_small ecapa_tdnn two_tower patchtst --threads 1"
    " --batches 1 --rounds 11 --record",
    "peers-threads": "peers --models resnet50 minilm bert_small ranker --threads 2 --batches 1 8 --rounds 9"
    " --without inductor --record --record-as peers-threads",
    "streaming": "streaming --models resnet152 bert_base minilm bert_small --rounds 11 --record",
    "streaming-sizes": "streaming --models resnet152 bert_base bert_short minilm bert_small --stores ram"
    " --shares 0.1 0.15 0.25 0.4 0.6 0.75 --rounds 21 --record-as streaming-sizes --record",
    "many": "many --record",
    "photo-library": "adoption photo-library --record",
    "workflows": "adoption workflows --record",
    "agent": "adoption agent --turns 3 --seconds 25 --record",
    "small-models": "small_models --rounds 800 --record",
    "ensembles": "ensembles --record",
    "first-start": "first_start --record",
    "edge": "edge --requests 30 --record",
    "edge-links": "edge.links --rounds 7 --record",
    "edge-text": "edge.text --record",
    "edge-fleet": "edge.fleet --record",
    "memory": "memory --record",
    "parity": "parity --record",
    "gpu-table2": "gpu.table2",
    "gpu-figure8": "gpu.figure8",
    "gpu-texts": "gpu.texts",
    "precision": "precision --record",
    "weights": "weights --record",
    "kernels": "kernels --record",
    "texts": "texts --record",
    "rewrites": "rewrites --models resnet50 mobilenet_v2 minilm lstm ranker yolox_nano conformer_ctc_small ecapa_tdnn"
    " patchtst qwen3_prefill --record",
    "sessions": "sessions --seconds 600 --layouts resident 'partitioned, 50%' 'lru, 60%' --record",
    "budget": "budget --record",
    "budget-cgroup": "budget_cgroup --record",
    "budget-small": "budget_small --record",
    "budget-searched": "budget_searched --record",
    "budget-jobs": "budget_jobs --record",
    "training-budget": "training --record-as training-budget --record",
    "imports": "imports --record",
    "imports-onnx": "imports_onnx --record",
    "elastic": "elastic --turns 2 --record",
    "capacity": "capacity --record",
    "tiling": "tiling --record",
    "tiling-greedy": "planner.tiling_greedy --record",
    "planner-speed": "planner.speed --record",
    "planner-table2": "planner.table2 --record",
    "planner-searchers": "planner.searchers --seconds 2 --processes 1 --record",
    "planner-served": "planner.served --processes 1 --record",
    "planner-foresight": "planner.foresight --record",
    "planner-training": "planner.throughput --seconds 20"
    " --networks wresnet152_10 inception_4 nasnet_25 rnn_8_8k brnn_4_8k --processes 1 --record",
    "planner-ablation": "planner.ablation --seeds 0 1 2 --processes 1 --record",
    "planner-chains": "planner.chains --seconds 2 --record",
    "planner-chains-lb": "planner.chains --lb --record",
    "planner-mixing": "planner.mixing --record",
    "planner-tensile": "planner.tensile --record",
}
"""The command of each result file, after `python -m benchmarks.`."""
EARLIER = {
    **dict.fromkeys(("training", "training-candidates", "predicted", "planner-home"), "95f7e81f"),
    "training-batch": "cca5d4a6",
    "planner-served-annealing": "67cdc6fb",
}
"""Records whose benchmarks are gone, and the last commit that has them. Each goes once another record replaces it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every benchmark that checks something found it to hold, or cannot run here."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description=__doc__, epilog=f"names: {', '.join(COMMANDS)}"
    )
    parser.add_argument(
        "names", nargs="*", default=["*"], help="of result files, also as 'planner-*' (default: all)"
    )
    wanted = parser.parse_args(argv).names
    for name in wanted:
        if not fnmatch.filter(COMMANDS, name):
            parser.error(f"no result file has the name {name}; there are {', '.join(COMMANDS)}")
    chosen = [n for n in COMMANDS if any(fnmatch.fnmatch(n, name) for name in wanted)]
    failed = []
    for name in chosen:
        print(f"== {name}: python -m benchmarks.{COMMANDS[name]}", flush=True)
        done = subprocess.run([sys.executable, "-m", *shlex.split(f"benchmarks.{COMMANDS[name]}")], check=False)
        if done.returncode not in (0, EXIT_UNAVAILABLE):
            failed.append(name)
    if failed:
        print(f"did not hold: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

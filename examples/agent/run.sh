#!/bin/sh
# Serve an agent's embedder, reranker and chat model from one process tree.
#
#     sh examples/agent/run.sh [further settings of `cohabit serve`]
#
# CHAT=~/SmolLM2-135M-Instruct takes a chat model of your own; without it, one of the same sizes has random weights.
set -eu
here=$(dirname "$0")
models=${MODELS:-agent-models}

[ -d "$models/chat" ] || python "$here/folders.py" "$models-folders"
for name in embedder reranker chat; do
    folder=$models-folders/$name
    if [ "$name" = chat ]; then folder=${CHAT:-$folder}; fi
    [ -d "$models/$name" ] || cohabit import "$folder" --name "$name" --repository "$models" --max-batch 1 \
        --max-sequence-length 256
done

# Keys and values of texts, and requests, take up to --queue-memory each. The size is a budget for planning: with it the
# processes took 603 MiB, and a warning at the start says that they may take more.
exec cohabit serve "$models" --process-memory 560MiB --store file --queue-memory 24MiB --batch-sizes 1 "$@"

#!/bin/sh
# Make twelve models, and serve six workflows of three to five of them in memory for 40 % of the models' weights.
#
#     sh examples/workflows/run.sh [further settings of `cohabit serve`]
set -eu
here=$(dirname "$0")
models=${MODELS:-workflow-models}

for name in $(python "$here/models.py" "$models"); do
    [ -d "$models/$name" ] || cohabit import "$here/models.py:$name" --name "$name" --repository "$models" --max-batch 1
done

# As with a GPU, the device's memory is scarce and the host's is not: all weights are in RAM beside it.
exec cohabit serve "$models" --memory 40% --batch-sizes 1 "$@"

#!/bin/sh
# Prepare the models of ./models on a workstation for a board, in 64 MiB for parameters and activations, and serve them there. The whole
# process takes 250 to 330 MiB: Python and torch are most of it. --process-memory 400MiB limits all of it instead of --memory.
#
#     sh examples/bundle.sh [further settings of `cohabit serve`]
set -eu

# On the workstation. Weights are not packed for its processor, and plans are made for a card that reads 90 MB/s. Op times are those of the
# workstation.
cohabit export-bundle models --memory 64MiB --batch-sizes 1 --link-bandwidth 90MB/s --no-pack-weights -o bundle

# On the board, after copying the folder. One process takes less memory than two; parameters stream from the bundle's
# files, and no search runs. Without archives and worker processes, a model cannot be replaced while it is served.
exec cohabit serve bundle --engine in-process "$@"

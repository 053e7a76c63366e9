#!/bin/sh
# Prepare the models of ./models on a workstation, in 64 MiB for parameters and activations, and serve them on a board. The whole
# process takes 250 to 330 MiB, most of it Python and torch. --process-memory 400MiB is a budget for all of it, instead of --memory.
#
#     sh examples/bundle.sh [further settings of `cohabit serve`]
set -eu

# On the workstation. Weights are not packed for its processor, and plans assume a card that reads 90 MB/s. Op times are the
# workstation's.
cohabit export-bundle models --memory 64MiB --batch-sizes 1 --link-bandwidth 90MB/s --no-pack-weights -o bundle

# On the board, after copying the folder. One process takes less memory than two; parameters stream from the bundle's
# files, and no search runs. Without archives and worker processes, a model cannot be replaced while it is served.
exec cohabit serve bundle --engine in-process "$@"

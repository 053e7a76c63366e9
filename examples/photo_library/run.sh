#!/bin/sh
# Make the six models of a photo library, and serve them within 512 MiB for the whole process tree.
#
#     sh examples/photo_library/run.sh [further settings of `cohabit serve`]
set -eu
here=$(dirname "$0")
models=${MODELS:-photo-models}

for name in clip_image clip_text face_detector face_embedder ocr_detector ocr_recognizer; do
    [ -d "$models/$name" ] || cohabit import "$here/models.py:$name" --name "$name" --repository "$models" --max-batch 1
done

# Parameters that do not fit stream from the disk. Images of unanswered requests take up to --queue-memory. The size is
# a budget for planning, which heaps exceed a little: 448 MiB stay below 512.
exec cohabit serve "$models" --process-memory 448MiB --store file --queue-memory 48MiB --batch-sizes 1 "$@"

#!/bin/sh
# Make five steps, and serve them as one model, `find`, in 200 MiB; the weights take 247.
#
#     sh examples/detection/run.sh [further settings of `cohabit serve`]
set -eu
here=$(dirname "$0")
models=${MODELS:-detection-models}

step() { [ -d "$models/$1" ] || cohabit import "$here/steps.py:$1" --input "$2" ${3:+--input "$3"} --repository "$models"; }
step prepare image:UINT8:480,640,3
step detector pixels:FP32:1,3,256,256
step select raw:FP32:1,3,16,16
step crop pixels:FP32:1,3,256,256 boxes:FP32:8,4
step classifier pixels:FP32:8,3,64,64
mkdir -p "$models/find/1"
cp "$here/config.pbtxt" "$models/find/"

exec cohabit serve "$models" --memory 200MiB "$@"

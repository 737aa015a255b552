#!/bin/bash
# Run from the repository root on a machine with a GPU: models larger than a VRAM budget of 4 GiB, placed, against
# everything resident and against what others do. Wall time leads, device time stands beside it. Needs python3 with
# torch, Triton, transformers and accelerate.
#   tests/device/run_placement.sh [--only GROUP[,GROUP]]
# Groups: square twice dtypes stream qwen bert gpt2 dit experts peers trouble packing load times eager refined any summary, 5 minutes each at most (experts: LIMIT_S=900; any: an hour, LIMIT_S=3600).
# OUT: where results go, OUT/bars/bench-placement-GROUP.json for docs/results. PYTHON: which python.
# WEIR_MACHINE: the probe report or the profile that plans take their constants from (default: the card's profile).
set -uo pipefail
out=${OUT:-reports/placement}
python=${PYTHON:-python3}
groups="square twice dtypes stream qwen bert gpt2 dit experts peers trouble packing load times eager refined any summary"
[ "${1:-}" = --only ] && groups=${2//,/ }
status=0
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:False}
export PYTHONPATH=$PWD:$PWD/tests/bench${PYTHONPATH:+:$PYTHONPATH}
for group in $groups; do
    began=$(date +%s)
    timeout -k 10 "${LIMIT_S:-300}" "$python" tests/device/placing.py --only "$group" --out "$out" || status=1
    echo "group $group: $(($(date +%s) - began)) s"
done
exit $status

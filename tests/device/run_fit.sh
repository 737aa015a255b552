#!/bin/bash
# Run from the repository root on a machine with a GPU: what `weir probe fit --measure gpu` finds under caps, against
# brute force and predictions, as lines of JSON and OUT/bench-fit-gpu.json. Needs python3 with torch and
# transformers; LoRA cases need peft and say so where it is missing. OUT: where results go. PYTHON: which python.
set -uo pipefail
export PYTHONPATH=$PWD:$PWD/tests/bench${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" tests/device/fit_on_gpu.py --out "${OUT:-reports/fit}"

#!/bin/bash
# Run from the repository root on a machine with an NVIDIA GPU and torch: the watch's figures against nvidia-smi's, its
# energy, cost and saturation of known loads, then what fits (run_fit.sh). JSON lines on
# standard output and reports in OUT. PYTHON: which python.
set -uo pipefail
export PYTHONPATH=$PWD:$PWD/tests/bench${PYTHONPATH:+:$PYTHONPATH} OUT=${OUT:-reports/probes}
"${PYTHON:-python3}" tests/device/watch_on_gpu.py
code=$?
OUT=$OUT/fit tests/device/run_fit.sh || code=$?
exit $code

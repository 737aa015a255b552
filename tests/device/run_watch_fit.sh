#!/bin/bash
# Run from the repository root on a machine with an NVIDIA GPU and torch: the watch's figures against nvidia-smi's, its
# energy, cost and saturation of known loads, then what fits, where tests/device/run_fit.sh is there. JSON lines on
# standard output and reports in OUT. PYTHON: which python.
set -uo pipefail
export PYTHONPATH=.:${PYTHONPATH:-} OUT=${OUT:-reports/probes}
"${PYTHON:-python3}" tests/device/watch_on_gpu.py
code=$?
if [ -x tests/device/run_fit.sh ]; then tests/device/run_fit.sh || code=$?; fi
exit $code

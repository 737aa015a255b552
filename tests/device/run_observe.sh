#!/bin/bash
# Run from the repository root, as root, on a machine with an NVIDIA GPU: this machine's own torch serves our model
# with three profiles while CUPTI tells which modules are loaded and fanotify which files are opened. The modules
# are looked for in the libraries by our own reader; a copy of the CUDA stack is then cut to what was loaded and
# opened, and the service must give the same bits on it. Bars as lines of JSON and in OUT/bars/bench-observe-gpu.json,
# what was loaded in OUT/gpu-code.jsonl; 4 minutes; 7 GB of disk below TREE.
# Needs python3 with PyPI's CUDA torch, and what images/variants.yaml lists under `wheels`. What is missing there can
# be carried as wheels, 10 MB (beside them backports.zstd for the pruner, for Pythons before 3.14):
#   pip install --target .weir/device --python-version 3.12 --only-binary :all: starlette uvicorn backports.zstd
# OUT: where results go. PYTHON: which python. DEVICE=cpu: a trial where there is no GPU (no bar means anything then).
# TARGET: the card to prune to (default: this machine's). TREE: where the copy goes.
set -uo pipefail
export PYTHONPATH=$PWD:$PWD/images:$PWD/tests/bench:$PWD/tests/device:$PWD/.weir/device${PYTHONPATH:+:$PYTHONPATH}
export CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
exec timeout -k 10 "${LIMIT_S:-560}" "${PYTHON:-python3}" tests/device/observe_on_gpu.py \
    --device "${DEVICE:-cuda}" --target "${TARGET:-}" --tree "${TREE:-/tmp/weir-observe-tree-$$}" \
    --out "${OUT:-reports/observe-gpu}"

#!/bin/bash
# Run from the repository root on a machine with an NVIDIA GPU: this machine's own torch and CUDA libraries, copied
# and pruned to its card by our pruner, against the same unpruned. Compared bit for bit: torch's own list of
# operations with its own samples, the libraries at sizes where other kernels are chosen, and the service's answers.
# Bars as lines of JSON and in OUT/bars/bench-cuda-variant.json; 3 minutes; 7 GB of disk below TREE.
# Needs python3 with PyPI's CUDA torch, and what images/variants.yaml lists under `wheels`. What is missing there can
# be carried as wheels, 10 MB (beside them backports.zstd for the pruner, for Pythons before 3.14):
#   pip install --target .weir/device --python-version 3.12 --only-binary :all: starlette uvicorn backports.zstd
# OUT: where results go. PYTHON: which python. DEVICE=cpu: a trial where there is no GPU (no bar means anything then).
# TARGET: the card to prune to (default: this machine's). TREE: where the copy goes. SECONDS_EACH: for the operations.
set -uo pipefail
export PYTHONPATH=$PWD:$PWD/images:$PWD/tests/bench:$PWD/tests/device:$PWD/.weir/device${PYTHONPATH:+:$PYTHONPATH}
export CUBLAS_WORKSPACE_CONFIG=:4096:8 PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
exec timeout -k 10 "${LIMIT_S:-400}" "${PYTHON:-python3}" tests/device/cuda_variant.py \
    --device "${DEVICE:-cuda}" --target "${TARGET:-}" --tree "${TREE:-/tmp/weir-cuda-tree-$$}" \
    --seconds "${SECONDS_EACH:-50}" --out "${OUT:-reports/cuda}"

#!/bin/bash
# Run from the repository root on a machine with a GPU: the service on it, as a table on standard output and as
# OUT/service-gpu.json: batches against one row at a time in every dtype, the time it adds to one request, memory,
# and weights placed within a budget. Needs what images/variants.yaml lists under `wheels`, and torch.
# PYTHON: which python. MACHINE: the profile of `weir plan` for the placed run.
set -uo pipefail
PYTHONPATH=images:tests/bench:.:${PYTHONPATH:-} exec "${PYTHON:-python3}" tests/device/service_on_gpu.py \
    --device "${DEVICE:-cuda}" --machine "${MACHINE:-h100}" --seconds "${SECONDS_EACH:-2}" --only "${ONLY:-}" \
    --out "${OUT:-reports/probes}"

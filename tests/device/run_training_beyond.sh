#!/bin/bash
# Run from the repository root on a machine with a GPU: training in 0.40 of the VRAM that it takes in plain torch,
# against plain torch, torchao's offloaded optimizer and FSDP2's CPU offload. Needs python3 with torch 2.11,
# transformers and peft; torchao on PYTHONPATH (without it its rows say so).
#   tests/device/run_training_beyond.sh [--smoke] [--only PART[,PART]] [--steps N]
# Parts: vit qwen half losses peers lora predict. --smoke: every part at small size, two minutes on a CPU, judged by its
# losses alone. In order of value, each below 5 minutes on an H200 (its host's memory has to grow at first):
#   tests/device/run_training_beyond.sh --only vit,peers
#   tests/device/run_training_beyond.sh --only lora,qwen
#   tests/device/run_training_beyond.sh --only half,predict
#   tests/device/run_training_beyond.sh --only losses --steps 200
# OUT: where results go, OUT/bars/bench-training-PART.json for docs/results. PYTHON: which python.
set -uo pipefail
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Equal losses need cuBLAS's same workspaces; other parts go without: torch 2.11 parses the setting by a regular
# expression at every product, which took over a third of a step's launches on an H100's host
[[ " $* " != *--only* || " $* " == *losses* ]] && export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
export PYTHONPATH=$PWD:$PWD/tests/bench${PYTHONPATH:+:$PYTHONPATH}
exec timeout -k 10 "${LIMIT_S:-540}" "${PYTHON:-python3}" tests/device/training_beyond.py --out "${OUT:-reports/training}" "$@"

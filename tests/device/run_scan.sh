#!/bin/bash
# Run from the repository root on a machine with a GPU: the saturation bars, then a direct scan of ParticleNet on the
# GPU and the CPU. Needs python3 with torch.
#   tests/device/run_scan.sh
# OUT: where results go; bars as OUT/bench-scan-gpu.json, the scan as OUT/*-throughput.json, its text as OUT/scan.md.
# LONGEST: seconds of a batch size's trials at most (2). PYTHON: which python.
set -uo pipefail
out=${OUT:-reports/throughput}
python=${PYTHON:-python3}
longest=${LONGEST:-2}
mkdir -p "$out"
export PYTHONPATH=$PWD:$PWD/tests/bench${PYTHONPATH:+:$PYTHONPATH}
status=0
timeout -k 5 60 "$python" tests/device/scan_on_gpu.py --out "$out" || status=1
timeout -k 5 140 "$python" -m probes throughput --backend pytorch --device gpu --max-batch 1024 --longest "$longest" \
    --aim 0 --precision fp32 --precision tf32 --precision fp16 --precision bf16 --precision autocast \
    --out "$out" > "$out/scan.txt" || status=1
timeout -k 5 70 "$python" -m probes throughput --backend pytorch --device gpu --device cpu --precision fp32 --trials 50 \
    --aim 0 --max-batch 256 --longest "$longest" --inputs pinned --inputs in-place --inputs resident \
    --out "$out/inputs" > "$out/inputs.txt" || status=1
for report in "$out"/*-throughput.json "$out"/inputs/*-throughput.json; do
    "$python" -m probes show --markdown "$report" > "${report%.json}.md" || status=1
done
grep -h "^- " "$out/scan.txt" "$out/inputs.txt"
exit $status

#!/bin/bash
# Run from the repository root on a machine with a GPU: the saturation bars, then direct scans of ParticleNet on the
# GPU and the CPU; at most 250 s. Needs python3 with torch.
# SERVED=1: also the service's model direct and served, side by side, in at most 130 s more; needs what
# images/variants.yaml lists under `wheels` as well.
#   tests/device/run_scan.sh
# OUT: where results go. Bars as OUT/bench-scan-gpu.json; reports as OUT/scan-CARD.json, scan-inputs-CARD.json and
# scan-served-CARD.json, such as scan-h100.json, each with its tables (.md), and its page (.html) if matplotlib is there.
# LONGEST: seconds of a batch size's trials at most (2). PYTHON: which python.
set -uo pipefail
out=${OUT:-reports/throughput}
python=${PYTHON:-python3}
longest=${LONGEST:-2}
mkdir -p "$out"
export PYTHONPATH=$PWD:$PWD/tests/bench:$PWD/images${PYTHONPATH:+:$PYTHONPATH}
status=0

# scan NAME LIMIT_S OPTION...: a direct scan, whose report is NAME.json
scan() {
    local name=$1 limit=$2 made
    shift 2
    echo "[$SECONDS s] $name"
    rm -rf "$out/.$name"
    timeout -k 5 "$limit" "$python" -m probes throughput --backend pytorch --aim 0 --longest "$longest" "$@" \
        --out "$out/.$name" > "$out/$name.txt" || status=1
    for made in "$out/.$name"/*-throughput.json; do
        mv "$made" "$out/$name.json" || status=1
    done
    rm -rf "$out/.$name"
}

# shown NAME: a report's tables, and its page where matplotlib is
shown() {
    "$python" -m probes show --markdown "$out/$1.json" > "$out/$1.md" || status=1
    "$python" -c "import matplotlib" 2> /dev/null || return
    "$python" -m probes html "$out/$1.json" || status=1
}

echo "[$SECONDS s] saturation bars"
timeout -k 5 60 "$python" tests/device/scan_on_gpu.py --out "$out" || status=1
# the card's own name in a word: h100 of "NVIDIA H100 80GB HBM3", mi300x, wx-4100
card=$("$python" -c 'import re, torch
name = torch.cuda.get_device_name(0).lower()
found = re.search(r"\b(?:(?:[rw]x|rtx|gtx|vii) )?[a-z]*\d+[a-z]*\b", name)
print(re.sub(r"[^a-z0-9]+", "-", found.group() if found else name))') || exit 1
scan "scan-$card" 120 --device gpu --max-batch 1024 \
    --precision fp32 --precision tf32 --precision fp16 --precision bf16 --precision autocast
shown "scan-$card"
scan "scan-inputs-$card" 70 --device gpu --device cpu --precision fp32 --trials 50 --max-batch 256 \
    --inputs pinned --inputs in-place --inputs resident
shown "scan-inputs-$card"
if [ -n "${SERVED:-}" ]; then
    scan "scan-served-$card" 40 --model encoder --device gpu --precision fp32 --max-batch 64 --trials 30
    timeout -k 5 90 "$python" tests/device/scan_served.py --into "$out/scan-served-$card.json" \
        >> "$out/scan-served-$card.txt" || status=1
    shown "scan-served-$card"
fi
grep -h "^- " "$out"/scan-*.txt
echo "[$SECONDS s] done"
exit $status

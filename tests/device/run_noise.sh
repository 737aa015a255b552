#!/bin/bash
# Run from the repository root on a machine with a GPU: a quick run by the clock, then this Python measured against
# itself in turns, in full mode: how many rows are called different, and in how many 5 % planted are found. Each
# bar is a line of JSON. About 9 minutes: the quick run takes 45 s, and the run in turns ends within LONGEST.
# As many rows as fit: transfers, break-even, and passes of the models in ARGS; the bars name how many there were.
# OUT: where reports go, and bars/bench-device-noise.json. PYTHON: which python, with torch and pytest.
# LONGEST: seconds for the run in turns (default: 450). QUICK=: leave the quick run out. MODE=--quick: to try it.
set -uo pipefail
export WEIR_COMMAND=tests/device/run_noise.sh
out=${OUT:-reports/noise}
python=${PYTHON:-python3}
longest=${LONGEST:-450}
args=${ARGS:---model mlp --model bert-base}
status=0
mkdir -p "$out/bars" "$out/quick" "$out/turns"

if [ -n "${QUICK-1}" ]; then
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    began=$(date +%s.%N)
    "$python" -m probes run --quick --require gpu --out "$out/quick" >"$log" 2>&1 || status=1
    took=$(echo "$began $(date +%s.%N)" | awk '{printf "%.1f", $2 - $1}')
    tail -n 3 "$log"
    WEIR_BARS=$out/bars/bench-device-noise-quick.json WEIR_QUICK_S=$took WEIR_LOG=$log \
        WEIR_REPORT=$(ls -t "$out"/quick/*.json | head -n 1) \
        "$python" -m pytest -q -s -W default -p no:cacheprovider tests/device/test_probe_report_of_this_machine.py || status=1
fi

rm -f "$out"/turns/*.json
# a run that is cut off leaves both reports with the pairs that it has measured
timeout -s INT "$((longest + 40))" "$python" -m probes run transfer breakeven scenarios $args --require gpu \
    ${MODE:-} --against "$(command -v "$python")" --longest "$longest" --out "$out/turns" || status=1
mapfile -t both < <(ls -t "$out"/turns/*.json)
[ "${#both[@]}" = 2 ] || { echo "expected two reports in $out/turns"; exit 1; }
WEIR_BARS=$out/bars/bench-device-noise.json WEIR_REPORT_BEFORE=${both[1]} WEIR_REPORT=${both[0]} \
    "$python" -m pytest -q -s -W default -p no:cacheprovider tests/device/test_probe_again.py || status=1
exit $status

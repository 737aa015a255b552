#!/bin/bash
# Run from the repository root on a machine with a GPU: every probe in quick mode, the report as text, then the
# relations that must hold on any GPU, each bar as a line of JSON. Needs python3 with torch and pytest.
# OUT: where reports go, and bars/bench-device-quick.json (-full.json) for docs/results. PYTHON: which python.
# FULL=1: full mode, then only the relations of its report.
# AA=1: two full runs of this machine, then how many rows are called different, and how many with 5 % planted.
# BEFORE=FILE with it: the first of the two was made earlier on this machine, this makes the second.
# ARGS: further arguments of the runs, such as "--model mlp --model bert-base" for fewer scenarios.
set -uo pipefail
out=${OUT:-reports/probes}
python=${PYTHON:-python3}
status=0
mode=--quick
bars=bars/bench-device-quick.json
tests=(tests/device/test_probe_*.py)
before=${BEFORE:-}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ -n "${FULL:-}${AA:-}" ]; then
    mode=
    bars=bars/bench-device-full.json
    tests=(tests/device/test_probe_report_of_this_machine.py)
fi
[ -n "${AA:-}" ] && tests+=(tests/device/test_probe_again.py)

measure() { # sets report, took and the log
    local began
    began=$(date +%s.%N)
    "$python" -m probes run $mode ${ARGS:-} --require gpu --out "$out" | tee "$log"
    code=${PIPESTATUS[0]}
    took=$(echo "$began $(date +%s.%N)" | awk '{printf "%.1f", $2 - $1}')
    echo "probes run: exit code $code, $took s"
    [ "$code" = 0 ] || status=1
    report=$(ls -t "$out"/*.json 2>/dev/null | head -n 1)
}

mkdir -p "$out/bars"
"$python" -m probes list || status=1
if [ -n "${AA:-}" ] && [ -z "$before" ]; then
    measure
    before=$report
fi
measure
[ -n "$report" ] && { "$python" -m probes show "$report" || status=1; }
WEIR_BARS=$out/$bars WEIR_REPORT=$report WEIR_REPORT_BEFORE=$before WEIR_QUICK_S=$took WEIR_LOG=$log \
    "$python" -m pytest -q -s -W default -p no:cacheprovider "${tests[@]}" || status=1
exit $status

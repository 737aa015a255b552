#!/bin/bash
# Run from the repository root on a machine with a GPU: training epochs of BERT-base and ResNet-50. Needs python3 with
# torch and transformers; torchvision and peft where they are.
#   tests/device/run_train.sh [--smoke] [--only GROUP[,GROUP]]
# Groups: pair, our loop against a bare one (3 minutes); table, BERT-base in every number format and ResNet-50 (2 minutes);
# more, LoRA of Qwen2.5-0.5B and out of memory (2 minutes); two, strong and weak scaling over all GPUs, 2 or more, 9
# minutes, or two-bert-base and two-resnet-50, its halves: not run unless named. --smoke: every line in a minute or two on a CPU, in sizes that say nothing.
# In order of value, each below 5 minutes:
#   tests/device/run_train.sh --only pair
#   tests/device/run_train.sh --only table,more
# OUT: where results go, OUT/bench-train-gpu-*.json and each report with its tables (.md). PYTHON: which python.
set -uo pipefail
out=${OUT:-reports/train}
python=${PYTHON:-python3}
groups="pair table more"
device=(--device gpu) smoke=
if [ "${1:-}" = --smoke ]; then
    smoke=--smoke device=(--device cpu --batch 1 --samples 2 --tokens 8 --precision fp32,amp-bf16 --epochs 2)
    shift
fi
[ "${1:-}" = --only ] && groups=${2//,/ }
mkdir -p "$out"
export PYTHONPATH=$PWD:$PWD/tests/bench${PYTHONPATH:+:$PYTHONPATH}
status=0

# epochs NAME LIMIT_S OPTION...: a report NAME.json with its tables
epochs() {
    local name=$1 limit=$2
    shift 2
    [ -n "$smoke" ] && limit=300
    echo "[$SECONDS s] $name"
    timeout -k 10 "$limit" "$python" -m probes epochs "$@" "${device[@]}" --json "$out/$name.json" \
        > "$out/$name.txt" 2> "$out/$name.err" || { echo "exit code $?"; tail -n 5 "$out/$name.err"; }
    "$python" -m probes show --markdown "$out/$name.json" > "$out/$name.md" || status=1
}

# judge GROUP [NAME]
judge() {
    timeout -k 10 280 "$python" tests/device/train_on_gpu.py "$1" ${2:+"$out/$2.json"} --out "$out" $smoke || status=1
}

for group in $groups; do
    began=$SECONDS
    case $group in
        pair) judge pair ;;
        table)
            epochs bert-base 180 bert-base --batch 64 --samples 2048 --repetitions 1 --epochs 3 \
                --precision fp32,tf32,amp-bf16,amp-fp16,bf16
            judge bars bert-base
            epochs resnet-50 80 resnet-50 --batch 128 --samples 1280 --workers 4 --repetitions 1 --epochs 3 \
                --precision amp-bf16
            judge bars resnet-50
            ;;
        more)
            epochs lora 80 qwen2.5-0.5b --lora 8 --tokens 512 --batch 4 --samples 128 --repetitions 1 \
                --epochs 2 --precision amp-bf16
            judge bars lora
            [ -n "$smoke" ] && continue # what no card holds, a host might
            epochs trouble 90 bert-base --batch 65536 --samples 65536 --tokens 512 --repetitions 1 --epochs 1
            judge trouble trouble
            ;;
        two | two-bert-base | two-resnet-50) # the whole is 9 minutes on H200s
            models=${group#two-}
            [ "$group" = two ] && models="bert-base resnet-50"
            cards=$("$python" -c 'import torch; n = torch.cuda.device_count(); print(",".join(str(k) for k in (1, 2, 4, 8) if k <= n))')
            for model in $models; do
                samples=16384
                [ "$model" = resnet-50 ] && samples=10240
                epochs "two-$model" 400 "$model" --batch 256 --samples "$samples" --workers 4 --repetitions 3 \
                    --epochs 3 --precision amp-bf16 --processes "$cards" --scaling strong,weak
                judge two "two-$model"
            done
            ;;
    esac
    echo "group $group: $((SECONDS - began)) s"
done
exit $status

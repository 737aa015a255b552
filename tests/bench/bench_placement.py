"""Placement without a GPU: packing, plans, loading, and random modules on lanes with adversarial timing.

Run by `make bench-placement`, in the environment that has torch. What needs a GPU is waived here, and judged
by tests/device/run_placement.sh. Prints one JSON line a bar; exit code 1 for a miss.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
sys.path.append(str(Path(__file__).parents[1] / "torch"))

import placement_experts
import placement_loading
import placement_packing
import placement_plan
import placement_trace
import placement_transformers
from board import Board, tell

MODULES = 1000
ON_A_GPU = (
    "40 layers, batch 1, fused, over all-resident",
    "40 layers, bit-identical, over all-resident",
    "64 layers (twice the VRAM), over the link's limit",
    "float16 and float32, streamed, over the link's limit",
    "unpacked streaming, of the pinned line rate",
    "Qwen2.5-3B, generate, over all-resident and accelerate",
    "BERT-base, GPT-2 XL, a mixture of experts, a diffusion transformer: captured over device time",
    "accelerate and naive .to() in the same run",
    "packing on a GPU",
    "peak VRAM and pinned memory as predicted",
    "predicted time of a pass",
    "after refining: predicted time, worst; over before, worst",
    "eager placed pass over the larger of eager resident and captured placed, worst",
    "out of memory with the cap at the budget",
    "experts, 128 x 8 of 2048 x 768, 48 layers (57 GB) in 16 GiB, batch 1, planted hit rates 0, 0.5, 0.75, "
    "0.9: <= 1.15 x (missing bytes as stored / zero-copy rate + resident time); captured",
    "the same: 0 differing bits in exact mode against the same kernels resident",
    "the same: >= 10 x accelerate in the same run",
    "Mixtral- and Qwen3-MoE-shaped models of transformers, whole, decode: run in 0.3 of their bytes, same "
    "tokens, table against streaming all experts and accelerate (pinned and default)",
)


def random_modules(board: Board) -> None:
    """Random modules by random plans, on lanes that put work off as long as the marks allow."""
    import test_random_placements as random_placements

    wrong, checked = [], 0
    for seed in range(MODULES):
        try:
            reads, *_ = random_placements.run(seed)
            checked += reads
        except AssertionError as error:
            wrong.append((seed, str(error).splitlines()[0][:120] if str(error) else "outputs differ"))
        if seed % 100 == 99:
            tell(f"{seed + 1} random modules, {len(wrong)} wrong")
    name = "random modules x plans: other outputs or stale reads"
    board.bar(name, len(wrong), 0, "modules", which=wrong[:5])
    board.figure("random modules x plans", MODULES, "modules", reads_checked=checked)


def on_a_gpu(board: Board) -> None:
    """What this machine can't show."""
    for name in ON_A_GPU:
        board.waive(name, "needs a GPU: tests/device/run_placement.sh")


PARTS: dict[str, Callable[[Board], None]] = {
    "packing": placement_packing.measure,
    "plan": placement_plan.bars,
    "trace": placement_trace.bars,
    "loading": placement_loading.bars,
    "modules": random_modules,
    "transformers": placement_transformers.bars,
    "experts": placement_experts.bars,
    "gpu": on_a_gpu,
}


def main() -> int:
    """Run all parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    board = Board(whole=not args.parts)
    for name in args.parts or PARTS:
        tell(f"{name} ...")
        PARTS[name](board)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())

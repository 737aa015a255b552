"""The fuzz bars of `make bench-prune`: damaged files end in a checked result or a typed refusal."""

import random
import sys
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

from board import Board, tell

from buildtool.gpucode.target import parse_targets
from buildtool.prune.trees import prune_file

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from gpucode.mangle import mangled, seeds, structured, survives

LIVELY = 0.25  # of the damaged files must get as far as being cut


def fuzz_bars(board: Board, count: int) -> None:
    tell(f"fuzz: {count} mangled files")
    originals = seeds()
    hurt = (mangled(originals[n % len(originals)], random.Random(n)) for n in range(count))
    cases = [case for seed in originals[:3] for case in structured(seed)]
    targets = parse_targets("gfx906,sm_90"), parse_targets("gfx906")
    ended: Counter[str] = Counter()
    for number, data in enumerate(chain(hurt, cases)):
        try:
            done = survives(data, targets[number // 2 % 2], strict=bool(number % 2))
            ended["checked result" if done else "typed refusal"] += 1
        except Exception as error:
            ended["crash"] += 1
            board.line({"crash": number, "error": repr(error)[:200]})
    board.line({"fuzz ended in": ended})
    board.figure("fuzz: mangled files", count, "files")
    board.figure("fuzz: files with one odd word each", len(cases), "files")
    # where damage is refused at once, the pruner itself was never tried
    checked = ended["checked result"] / sum(ended.values())
    board.bar(
        "fuzz: damaged files that are cut all the same, and checked",
        checked,
        LIVELY,
        "of them",
        at_least=True,
    )
    board.bar("fuzz: anything but a checked result or a typed refusal", ended["crash"], 0, "files")
    board.bar("fuzz: files changed on refusal", changed_on_refusal(originals[0]), 0, "files")


def changed_on_refusal(library: bytes) -> int:
    changed = 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "lib.so"
        for number in range(200):
            data = mangled(library, random.Random(number))
            path.write_bytes(data)
            try:
                prune_file(path, parse_targets("gfx906"))
            except Exception:
                changed += path.read_bytes() != data or len(list(path.parent.iterdir())) != 1
    return changed

"""How long builds of the `cpu` image take, against the naive way with the same base and the same wheels.

Run by `make bench-build`. Before each timed build the image and BuildKit's whole cache go, so that both
sides transfer, install, compress and unpack everything. Ends with one JSON line a bar.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from board import Board, tell

from buildtool import buildx, catalog, pipeline, plan
from buildtool.engine import Engine

ROUNDS = 3
ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "-m", "buildtool", "build", "cpu", "--no-audit"]


def quiet(*args: str) -> None:
    subprocess.run(args, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)


def forget(*refs: str) -> None:
    """Leave the engine nothing to reuse."""
    for ref in refs:
        subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)
    quiet("docker", "builder", "prune", "-af")


def timed(action: Callable[[], None]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def naive_target() -> plan.Target:
    """The cpu variant's very inputs, built as most people would: one pip install, the default exporter."""
    chosen = catalog.load()
    cpu = chosen.select(("cpu",))[0]
    state = ROOT / ".weir"
    place = pipeline.Workplace(state, ROOT / "images" / "variants.lock.json", lambda _line: None)
    [target] = pipeline.prepare(place, chosen, [cpu], engine=Engine(), update_lock=False)
    naive = replace(cpu, name="bench-naive", dockerfile=catalog.IMAGES / "naive" / "Dockerfile")
    return plan.Target(naive, target.resolved, target.context)


def build_naive(target: plan.Target, engine: Engine) -> None:
    baked = plan.plan_bake([target], epoch=1, zstd=True)
    buildx.bake(baked, [target], engine=engine, say=lambda _line: None, no_cache=True)


def digest_of(engine: Engine, ref: str) -> str:
    found = engine.inspect(ref)
    assert found is not None
    return str(found["Id"])


def change_service(work: Path) -> Path:
    """A file of the service, changed for the length of a build; returns its backup."""
    file = ROOT / "images" / "service" / "__init__.py"
    backup = work / "service-init.py"
    shutil.copy2(file, backup)
    file.write_text(file.read_text() + f"\n# changed at {time.time()}\n")
    return backup


def main() -> int:
    engine = Engine()
    target = naive_target()
    ours, naive, digests = [], [], []
    for _ in range(ROUNDS):
        forget(target.variant.ref, "weir/cpu:latest")
        naive.append(timed(lambda: build_naive(target, engine)))
        forget(target.variant.ref, "weir/cpu:latest")
        ours.append(timed(lambda: quiet(*BUILD, "--no-cache")))
        digests.append(digest_of(engine, "weir/cpu:latest"))
        tell(f"naive {naive[-1]:.1f} s, ours {ours[-1]:.1f} s")
    forget(target.variant.ref)
    quiet(*BUILD)
    unchanged = [timed(lambda: quiet(*BUILD)) for _ in range(ROUNDS)]
    work = ROOT / ".weir"
    changed = []
    for _ in range(ROUNDS):
        backup = change_service(work)
        try:
            changed.append(timed(lambda: quiet(*BUILD)))
        finally:
            shutil.copy2(backup, ROOT / "images" / "service" / "__init__.py")
            backup.unlink()
    quiet(*BUILD)
    ratios = [a / b for a, b in zip(ours, naive, strict=True)]
    board = Board()
    board.line({"naive_s": statistics.median(naive), "ours_s": statistics.median(ours), "rounds": ROUNDS})
    board.bar("build-ratio", statistics.median(ratios), 0.40, "ratio")
    board.bar("rebuild-unchanged", statistics.median(unchanged), 3, "s")
    board.bar("rebuild-service-changed", statistics.median(changed), 8, "s")
    board.bar("same-digest-without-cache", len(set(digests)), 1, "digests")
    return int(board.missed)


sys.exit(main())

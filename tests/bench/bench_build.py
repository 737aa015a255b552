"""How long builds of the `cpu` image take, against the naive way with the same base and the same wheels.

Run by `make bench-build`. Before each timed build the image and BuildKit's whole cache go, so that both
sides transfer, install, compress and unpack everything. Ends with one JSON line a bar.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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


def bar(name: str, value: float | str, limit: float | str, unit: str, *, ok: bool) -> bool:
    print(json.dumps({"bar": name, "value": value, "limit": limit, "unit": unit, "ok": ok}))
    return ok


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
        print(f"naive {naive[-1]:.1f} s, ours {ours[-1]:.1f} s", file=sys.stderr)
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
    print(
        f"# medians of {ROUNDS}: naive {statistics.median(naive):.1f} s, ours {statistics.median(ours):.1f} s"
    )
    ratios = [a / b for a, b in zip(ours, naive, strict=True)]
    ratio, same, code = statistics.median(ratios), statistics.median(unchanged), statistics.median(changed)
    passed = [
        bar("build-ratio", round(ratio, 3), 0.40, "ratio", ok=ratio <= 0.40),
        bar("rebuild-unchanged", round(same, 2), 3, "s", ok=same <= 3),
        bar("rebuild-service-changed", round(code, 2), 8, "s", ok=code <= 8),
        bar("same-digest-without-cache", len(set(digests)), 1, "digests", ok=len(set(digests)) == 1),
    ]
    return 0 if all(passed) else 1


sys.exit(main())

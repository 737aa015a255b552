"""How long builds of the `cpu` image take, against two ways to write a Dockerfile with the same inputs.

Run by `make bench-build`. `naive` is what most people write (pip compiles bytecode, the exporter's default
compression); `fair` is the same Dockerfile without bytecode and with the compression that ours uses, so that
what is left is the way of installing and unpacking. Before each timed build the image and BuildKit's whole
cache go, and ours writes every layer anew, so every side installs, compresses and unpacks everything. Then:
what a rebuild takes, and how long a container takes from its start to ready with and without the bytecode in
the image.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from board import Board, tell

from buildtool.audit.audit import audit_image
from buildtool.build import catalog, pipeline, plan
from buildtool.build.workplace import Workplace
from buildtool.core.model import ZSTD_LEVEL
from buildtool.core.shipped import IMAGES
from buildtool.engine import buildx
from buildtool.engine.client import Engine

ROUNDS = 3
STARTS = 7  # of a container, each way, by turns
READY_LIMIT_S = 120
ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, "-m", "buildtool", "build", "cpu", "--no-audit"]
OURS, BARE = "weir/cpu:latest", "weir/bench-bare:latest"
WITHOUT_BYTECODE = f"""FROM {OURS}
USER 0:0
RUN find /opt/weir -name '*.pyc' -delete
USER 10001:10001
"""
OURS_COMPRESSION = (
    f"type=image,oci-mediatypes=true,compression=zstd,compression-level={ZSTD_LEVEL},force-compression=true"
)
COUNT_BYTECODE = (
    "import pathlib; print(sum(p.stat().st_size for p in pathlib.Path('/opt/weir').rglob('*.pyc')))"
)


def quiet(*args: str, stdin: str | None = None) -> str:
    return subprocess.run(
        args, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True, input=stdin
    ).stdout


def forget(*refs: str) -> None:
    """Leave the engine nothing to reuse."""
    for ref in refs:
        subprocess.run(["docker", "image", "rm", "-f", ref], check=False, capture_output=True)
    quiet("docker", "builder", "prune", "-af")


def timed(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def others_image(name: str) -> plan.ImagePlan:
    """The cpu variant's very inputs, for the Dockerfile that most people would write."""
    chosen = catalog.load()
    cpu = chosen.select(("cpu",))[0]
    place = Workplace(ROOT / ".weir", ROOT / "images" / "variants.lock.json", lambda _line: None)
    made = pipeline.make_plan(place, [[cpu]], engine=Engine(), epoch=chosen.source_date_epoch)
    tools = place.wheels.tools()  # pip, which the Dockerfile runs
    variant = replace(cpu, name=name, dockerfile=IMAGES / "naive" / "Dockerfile")
    image = replace(made.images[0], variant=variant, context=place.state / "context" / name)
    pipeline.stage(place, replace(made, images=(image,), tools=tools))
    return image


def build_theirs(image: plan.ImagePlan, engine: Engine, *, fair: bool) -> None:
    baked = plan.BuildPlan((image,), epoch=1).bake()
    asked = baked["target"][image.variant.name]
    if fair:
        asked["args"]["PIP_OPTIONS"] = "--no-compile"
        asked["output"] = [OURS_COMPRESSION]
    buildx.bake_plan(baked, engine=engine, progress=lambda _line: None, no_cache=True)


def digest_of(engine: Engine, ref: str) -> str:
    found = engine.inspect(ref)
    assert found is not None
    return str(found["Id"])


def build_bars(board: Board) -> None:
    """Whole builds by turns, each from nothing."""
    engine = Engine()
    others = {name: others_image(f"bench-{name}") for name in ("naive", "fair")}
    refs = [OURS, *(image.variant.ref for image in others.values())]
    took: dict[str, list[float]] = {"naive": [], "fair": [], "ours": []}
    digests = set()
    for _ in range(ROUNDS):
        for name, image in others.items():
            forget(*refs)
            took[name].append(
                timed(lambda name=name, image=image: build_theirs(image, engine, fair=name == "fair"))
            )
            if len(took[name]) == 1:
                sizes(board, image.variant.ref, name, engine)
        forget(*refs)
        took["ours"].append(timed(lambda: quiet(*BUILD, "--no-cache")))
        digests.add(digest_of(engine, OURS))
        tell(", ".join(f"{name} {seconds[-1]:.1f} s" for name, seconds in took.items()))
    sizes(board, OURS, "ours", engine)
    forget(*(image.variant.ref for image in others.values()))
    for name, seconds in took.items():
        board.figure(f"{name}: build", statistics.median(seconds), "s", each=[round(s, 1) for s in seconds])
    for name in others:
        ratio = statistics.median(a / b for a, b in zip(took["ours"], took[name], strict=True))
        if name == "naive":
            board.bar("build-ratio", ratio, 0.17, "of the naive build's time")
        else:
            board.figure("build-ratio-fair", ratio, "of the fair build's time")
    board.bar("same-digest-without-cache", len(digests), 1, "digests", builds=ROUNDS)


def sizes(board: Board, ref: str, name: str, engine: Engine) -> None:
    totals = audit_image(ref, engine=engine).totals
    board.figure(f"{name}: unpacked", totals.unpacked_bytes, "bytes")
    if isinstance(totals.stored_bytes, int):
        board.figure(f"{name}: stored", totals.stored_bytes, "bytes")


def rebuild_bars(board: Board) -> None:
    """Nothing changed; one file of the service changed."""
    quiet(*BUILD)
    unchanged = [timed(lambda: quiet(*BUILD)) for _ in range(ROUNDS)]
    file = ROOT / "images" / "service" / "__init__.py"
    backup = ROOT / ".weir" / "service-init.py"
    shutil.copy2(file, backup)
    changed = []
    try:
        for number in range(ROUNDS):
            file.write_text(backup.read_text() + f"\n# changed, {number}, {time.time()}\n")
            changed.append(timed(lambda: quiet(*BUILD)))
    finally:
        shutil.copy2(backup, file)
        backup.unlink()
    quiet(*BUILD)
    board.bar("rebuild-unchanged", statistics.median(unchanged), 3, "s")
    board.bar("rebuild-service-changed", statistics.median(changed), 1.5, "s")


def start_figures(board: Board) -> None:
    """From `docker run` to the service's word that it is ready, with and without bytecode, by turns."""
    quiet("docker", "build", "-q", "--network=none", "-t", BARE, "-", stdin=WITHOUT_BYTECODE)
    took: dict[str, list[float]] = {OURS: [], BARE: []}
    try:
        for image in took:
            start_s(image)  # its files into the page cache
        for _ in range(STARTS):
            for image, seconds in took.items():
                seconds.append(start_s(image))
        counted = quiet("docker", "run", "--rm", "--network=none", OURS, "python3", "-c", COUNT_BYTECODE)
    finally:
        subprocess.run(["docker", "image", "rm", "-f", BARE], check=False, capture_output=True)
    cost = [bare - ours for ours, bare in zip(took[OURS], took[BARE], strict=True)]
    for name, seconds in (("without bytecode", took[BARE]), ("with bytecode", took[OURS])):
        board.figure(
            f"start to ready, {name}", statistics.median(seconds), "s", each=[round(s, 2) for s in seconds]
        )
    board.figure(
        "start cost of no bytecode",
        statistics.median(cost),
        "s",
        least=round(min(cost), 2),
        most=round(max(cost), 2),
    )
    board.figure("bytecode left out", int(counted), "bytes")


def start_s(image: str) -> float:
    """Seconds from `docker run` to the service's line that it is ready. Raises RuntimeError without one."""
    begun = time.monotonic()
    name = f"weir-bench-{time.monotonic_ns()}"
    words = ["docker", "run", "--rm", "--name", name, "--network=none", image]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    guard = threading.Timer(READY_LIMIT_S, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "ready weights=" in line:
                return time.monotonic() - begun
        raise RuntimeError(f"{image} didn't become ready:\n{''.join(said[-5:])}")
    finally:
        guard.cancel()
        subprocess.run(["docker", "kill", name], check=False, capture_output=True)
        process.communicate()


GROUPS = {"builds": build_bars, "rebuilds": rebuild_bars, "starts": start_figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="some of the bars")
    args = parser.parse_args()
    board = Board(whole=args == parser.parse_args([]))
    for group in args.only:
        GROUPS[group](board)
    quiet(*BUILD)
    return board.finish()


sys.exit(main())

"""Builds interrupted at random moments of every step, and what is left of them.

Run by `make bench-trouble`. A small variant is built once as a reference: a stand-in torch from an index on
loopback, a Debian base from the real mmdebstrap, pruned, exported by the real engine, proved, audited. Then,
round by round, what one step makes is removed, the build is started and gets SIGINT, SIGTERM, SIGHUP or
SIGKILL at a random moment of that step. What is built then differs from the reference's image. Afterwards
every file under a final name must be whole, and the tag must name the reference's image, or the new one if
that is proved; the next run must succeed, give the reference's image, and leave nothing half-written.

`--rounds N`, `--seed N` and `--step NAME ...` for a part. The whole takes about 10 minutes on 2 idle cores.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from board import Board, tell

from buildtool.build.lockfile import Lock
from buildtool.core.errors import Exit
from buildtool.engine.client import Engine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/docker"))
from standins import Index, Shop, make_wheel, package_index  # noqa: E402

ROUNDS = 50
EXIT_LIMIT_S = (
    8  # after SIGINT, SIGTERM or SIGHUP: programs get 3 s, threads 3 s, the rest is Python's own end
)
VARIANT = f"trouble-{os.getpid()}"
REF = f"weir/{VARIANT}:latest"
SUMMARY = "small, made of everything that a build has"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
CATALOG = """  {variant}:
    summary: {summary}
    python: "3.11"
    base:
      - bootstrap:
          suite: bookworm
          packages: [libpython3-stdlib, python3-minimal, usr-is-merged]
    torch:
      - {{name: standin-index, build: rocm, require: ["torch==9.1.0+rocm9.9"], index: "{url}"}}
    gpu_targets: [gfx906]
    prune: true
"""
TORCH = """
__version__ = "9.1.0+rocm9.9"
float32 = None
class version:
    hip, cuda = "9.9", None
class Tensor:
    def __init__(self, rows): self.rows = rows
    def reshape(self, m, n): return Tensor([self.rows[i * n:(i + 1) * n] for i in range(m)])
    @property
    def T(self): return Tensor([list(column) for column in zip(*self.rows)])
    def __matmul__(self, other):
        return Tensor([[sum(a * b for a, b in zip(r, c)) for c in zip(*other.rows)] for r in self.rows])
    def tolist(self): return self.rows
def arange(n, dtype=None): return Tensor([float(i) for i in range(n)])
"""


@dataclass(frozen=True)
class Step:
    """A step of a build: what to remove so that it happens, and between which lines of progress it runs.

    `begins` None is the start of the process. Of several lines that match, the last of the reference counts.
    """

    name: str
    begins: str | None
    ends: str
    removed: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    share: int = 1  # of the rounds


PRUNED = r": .* less, .* files deleted"
STEPS = (
    Step("resolve", None, r"making a root file system", ("lock.json", "state/wheels"), share=3),
    Step("mmdebstrap", r"making a root file system", r"pruning ", ("state/rootfs",), share=2),
    Step("prune", r"pruning bookworm", PRUNED, ("state/pruned",), share=3),
    Step("write", PRUNED, r"giving it to the engine", ("state/pruned", "state/layers"), share=3),
    Step("load", r"giving it to the engine", r"proving", options=("--no-cache",), share=3),
    Step("prove", r"proving", r"auditing", ("state/proved",), share=3),
    Step("audit", r"auditing", r"reports are in", ("state/audited",), share=3),
)


@dataclass
class Run:
    """A build that runs, and its lines of progress with the second each came at."""

    process: "subprocess.Popen[str]"
    begun: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        for line in self.process.stderr or ():
            with self.came:
                self.lines.append((time.monotonic() - self.begun, line.rstrip()))
                self.came.notify_all()
        with self.came:
            self.came.notify_all()

    def at(self, pattern: str | None) -> float | None:
        """When the last line that matches came; None when none has."""
        if pattern is None:
            return 0.0
        times = [second for second, line in self.lines if re.search(pattern, line)]
        return times[-1] if times else None

    def await_line(self, pattern: str | None, count: int) -> bool:
        """Wait for so many lines that match; False when the build ended before."""
        with self.came:
            while pattern and sum(bool(re.search(pattern, line)) for _, line in self.lines) < count:
                if self.process.poll() is not None:
                    return False
                self.came.wait(0.2)
        return True


def start(shop: Shop, *options: str) -> Run:
    # a bench run in the background ignores SIGINT, and its children would with it
    command = ["env", "--default-signal", *shop.command(VARIANT, *options)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=shop.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = Run(process, time.monotonic())
    threading.Thread(target=run.listen, daemon=True).start()
    return run


def clear(path: Path) -> None:
    if path.is_dir():
        subprocess.run(["rm", "-rf", "--", str(path)], check=True)
    path.unlink(missing_ok=True)


def half_written(shop: Shop) -> list[str]:
    """Files under their final name that aren't whole, and why."""
    return [f"{path}: {why}" for path, why in _faults(shop)]


def _faults(shop: Shop) -> Iterator[tuple[Path, str]]:
    checks = (_rootfs_faults, _wheel_faults, _pruned_faults, _json_faults)
    for check in checks:
        yield from check(shop)
    for blob in (shop.state / "layout/blobs/sha256").glob("*"):
        if sha256(blob) != blob.name:
            yield blob, "isn't what its digest says"
    for page in (shop.folder / "reports").glob("*.html"):
        if not page.read_text().rstrip().endswith("</html>"):
            yield page, "cut short"


def _rootfs_faults(shop: Shop) -> Iterator[tuple[Path, str]]:
    for tar in (shop.state / "rootfs").glob("*.tar"):
        digest = tar.with_suffix(".sha256")
        if digest.exists() and digest.read_text() != sha256(tar):
            yield tar, "isn't what its digest says"
        if not tar_is_whole(tar):
            yield tar, "cut short"


def _wheel_faults(shop: Shop) -> Iterator[tuple[Path, str]]:
    for wheel in (shop.state / "wheels").glob("[0-9a-f]*/*"):
        if sha256(wheel) != wheel.parent.name:
            yield wheel, "isn't what its digest says"


def _pruned_faults(shop: Shop) -> Iterator[tuple[Path, str]]:
    for told in (shop.state / "pruned").glob("*.json"):
        data = json.loads(told.read_text())
        for archive in told.parent.glob(f"{told.stem}.[tw]*"):
            if data["changed"] and data["sha256"] != sha256(archive):
                yield archive, "isn't what its digest says"
    for archive in (shop.state / "pruned").glob("*.whl"):
        if not zipfile.is_zipfile(archive):
            yield archive, "cut short"
    for archive in (shop.state / "pruned").glob("*.tar"):
        if not tar_is_whole(archive):
            yield archive, "cut short"


def _json_faults(shop: Shop) -> Iterator[tuple[Path, str]]:
    seals = [
        path for kind in ("audited", "proved", "layers") for path in (shop.state / kind).glob("[0-9a-f]*")
    ]
    seals += shop.state.glob("layout/index.json")
    for path in (*seals, *(shop.folder / "reports").glob("*.json")):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            yield path, str(error)
    try:
        Lock.load(shop.folder / "lock.json")
    except Exception as error:
        yield shop.folder / "lock.json", str(error)


def tar_is_whole(path: Path) -> bool:
    try:
        with tarfile.open(path, "r:") as tar:
            last = tar.getmembers()[-1]
        return path.stat().st_size >= last.offset_data + last.size + 1024
    except (tarfile.TarError, IndexError):
        return False


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def leftovers(shop: Shop) -> list[str]:
    """Partial files, scratch folders and containers."""
    files = [str(path) for path in shop.folder.rglob(".weir-*.partial")]
    label = "io.weir.owner"
    ps = [
        "docker",
        "ps",
        "-a",
        "--filter",
        f"label={label}",
        "--format",
        f'{{{{.ID}}}} {{{{.Label "{label}"}}}}',
    ]
    containers = subprocess.run(ps, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [name for name in Engine().tags("weir-building") if name.endswith(VARIANT)]
    return [*files, *names, *(line for line in containers if str(shop.state) in line)]


def named(ref: str) -> str:
    """The id of the image that a tag names; empty where there is none."""
    return str((Engine().inspect(ref) or {}).get("Id", ""))


def wrongly_named(shop: Shop, reference: "Reference") -> list[str]:
    """Tags that name neither the reference's image nor one that a build has proved."""
    proved = {reference.image, image_of(shop)}  # a record is written after the proof
    names = (name for name in Engine().tags("weir/*") if VARIANT in name)
    wrong = [f"{name} names an unproved image, {named(name)}" for name in names if named(name) not in proved]
    return wrong if named(REF) else [*wrong, f"{REF} names no image"]


@dataclass
class Tally:
    """What was seen over all rounds."""

    clean: int = 0
    rightly_named: int = 0
    recovered: int = 0
    slowest_exit_s: float = 0.0
    left_after_stop: int = 0  # rounds in which a signal that can be heard left a partial for the next run
    faults: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """The build that nobody interrupted."""

    seconds: dict[str, float]  # of each step
    lines: dict[str, int]  # how many lines announce each step
    image: str

    @staticmethod
    def of(run: Run, shop: Shop) -> "Reference":
        seconds, lines = {}, {}
        for step in STEPS:
            begin, end = run.at(step.begins), run.at(step.ends)
            if begin is None or end is None:
                raise SystemExit(
                    f"no {step.name} in the reference run:\n" + "\n".join(x for _, x in run.lines)
                )
            seconds[step.name] = max(0.02, end - begin)
            lines[step.name] = sum(bool(re.search(step.begins or "$^", line)) for _, line in run.lines)
        return Reference(seconds, lines, image_of(shop))


def image_of(shop: Shop) -> str:
    data = json.loads((shop.folder / f"reports/{VARIANT}.build.json").read_text())
    return named(str(data["image"]["digest"])) or str(data["image"]["digest"])


def await_handlers(process: "subprocess.Popen[str]") -> None:
    """Until the build has begun to listen for SIGTERM; before that it is only a Python that starts."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = re.search(r"SigCgt:\t([0-9a-f]+)", status.read_text())
        if caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)


def interrupt(
    shop: Shop, step: Step, number: signal.Signals, reference: Reference, dice: random.Random
) -> float:
    """Interrupt a build at a random moment of a step; the seconds until it ended. Tries until it hits."""
    while True:
        for name in step.removed:
            clear(shop.folder / name)
        run = start(shop, *step.options)
        await_handlers(run.process)
        if run.await_line(step.begins, reference.lines[step.name]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(dice.uniform(0, reference.seconds[step.name]))
        sent = time.monotonic()
        run.process.send_signal(number)
        code = run.process.wait()
        waited = time.monotonic() - sent
        if code == 0 or run.at(STEPS[-1].ends) is not None:  # it was quicker than the reference
            continue
        wanted = -number if number is signal.SIGKILL else Exit.INTERRUPTED
        if code != wanted or any("Traceback" in line for _, line in run.lines):
            said = "\n".join(line for _, line in run.lines[-15:])
            raise SystemExit(f"{step.name}: exit {code} after {number.name}:\n{said}")
        return waited


def one_round(
    shop: Shop, step: Step, number: signal.Signals, tally: Tally, *, reference: Reference, dice: random.Random
) -> None:
    usual = (shop.folder / "variants.yaml").read_text()
    (shop.folder / "variants.yaml").write_text(usual.replace(SUMMARY, f"another image, {dice.random()}"))
    waited = interrupt(shop, step, number, reference, dice)
    (shop.folder / "variants.yaml").write_text(usual)
    faults = wrongly_named(shop, reference)
    tally.rightly_named += not faults
    if number is not signal.SIGKILL:
        tally.slowest_exit_s = max(tally.slowest_exit_s, waited)
        tally.left_after_stop += bool(leftovers(shop))
    torn = half_written(shop)
    tally.clean += not torn
    faults += torn
    again = start(shop)
    code = again.process.wait()
    faults += [f"next run: exit {code}: {again.lines[-6:]}"] if code else []
    faults += half_written(shop) + [f"left: {path}" for path in leftovers(shop)]
    if not code and not image_of(shop) == named(REF) == reference.image:
        faults.append(f"next run: image {image_of(shop)}, not {reference.image}")
    tally.recovered += not faults
    tally.faults += [f"{step.name}, {number.name}: {fault}" for fault in faults]
    key = f"{step.name}/{number.name}"
    tally.counts[key] = tally.counts.get(key, 0) + 1


def make_inputs(index: Index) -> None:
    noise = random.Random(1)
    kernels = {
        f"torch/lib/Kernels_{card}.co": noise.randbytes(3_000_000).hex() for card in ("gfx803", "gfx906")
    }
    make_wheel(index.files, "torch", "9.1.0+rocm9.9", {"torch/__init__.py": TORCH, **kernels})
    index.refresh()


@contextlib.contextmanager
def shop_below(folder: Path) -> Iterator[Shop]:
    with package_index(folder / "index") as index:
        make_inputs(index)
        made = Shop(folder / "shop")
        made.folder.mkdir()
        made.write(CATALOG.format(variant=VARIANT, url=index.url, summary=SUMMARY))
        try:
            yield made
        finally:
            Engine().remove_tag(REF)


def plan_of_rounds(
    rounds: int, dice: random.Random, only: Sequence[str]
) -> Sequence[tuple[Step, signal.Signals]]:
    """Every step gets its share, every signal comes as often as others within it; in random order."""
    weighted = [step for step in STEPS for _ in range(step.share) if step.name in only]
    chosen = [(weighted * rounds)[i] for i in range(rounds)]
    seen: dict[str, int] = {}
    planned = []
    for step in chosen:
        at = seen.setdefault(step.name, dice.randrange(len(SIGNALS)))
        planned.append((step, SIGNALS[at % len(SIGNALS)]))
        seen[step.name] += 1
    dice.shuffle(planned)
    return planned


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=None)
    names = [step.name for step in STEPS]
    parser.add_argument("--step", choices=names, nargs="+", default=names, help="interrupt only these")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    dice = random.Random(seed)
    board = Board(whole=args.rounds >= ROUNDS and len(args.step) == len(STEPS))
    with tempfile.TemporaryDirectory(prefix="weir-trouble-") as name, shop_below(Path(name)) as shop:
        run = start(shop)
        if run.process.wait():
            raise SystemExit("the reference run failed:\n" + "\n".join(line for _, line in run.lines))
        reference = Reference.of(run, shop)
        tell(f"reference: {', '.join(f'{k} {v:.1f} s' for k, v in reference.seconds.items())}; seed {seed}")
        tally = Tally()
        planned = plan_of_rounds(args.rounds, dice, args.step)
        for i, (step, number) in enumerate(planned, 1):
            one_round(shop, step, number, tally, reference=reference, dice=dice)
            tell(f"{i} of {args.rounds}: {step.name}, {number.name}; {len(tally.faults)} faults")
            for fault in tally.faults:
                tell(f"  {fault}")
    board.line({"seed": seed, "rounds": tally.counts, "faults": tally.faults})
    board.bar("tags-name-proved-images", tally.rightly_named, args.rounds, "rounds", at_least=True)
    board.bar("nothing-half-written", tally.clean, args.rounds, "rounds", at_least=True)
    board.bar("next-run-succeeds-and-cleans", tally.recovered, args.rounds, "rounds", at_least=True)
    board.bar("exit-after-a-signal", tally.slowest_exit_s, EXIT_LIMIT_S, "s")
    board.figure("partials-left-for-the-next-run-by-a-stop", tally.left_after_stop, "rounds")
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())

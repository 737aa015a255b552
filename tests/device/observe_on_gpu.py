"""On a GPU: which code a service loads, what of the CUDA stack that leaves, and its answers on the rest.

See run_observe.sh.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from board import Board, tell
from cuda_variant import PROFILES, answers, bytes_of, copy_tree, distributions, gpu_name, own_target

from buildtool.gpucode import loaded
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.source import GpuCodeError
from buildtool.gpucode.target import parse_targets
from buildtool.gpucode.used import Used, is_generated, machine_code
from buildtool.keep.margin import Node, Reason, Tree, kept_paths
from buildtool.keep.symbols import needed_libraries
from buildtool.observe.fanotify import Fanotify
from buildtool.prune.trees import open_source, prune_tree

SITE = "site-packages"
ELF, ELF_BYTES = b"\x7fELF", 100_000
BYTECODE = re.compile(r"__pycache__/([^/]+)\.cpython-\d+(?:\.opt-\d)?\.pyc$")
# a child that is forked before CUDA is begun must be able to begin it: servers fork their workers
FORK = (
    "import os, sys\nif (pid := os.fork()): sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    "import torch\nassert float(torch.ones(8, device=sys.argv[1]).sum()) == 8\nos._exit(0)"
)


class Run:
    """A folder of one run, and the bars that its parts say."""

    def __init__(self, board: Board, folder: Path, device: str) -> None:
        self.board, self.folder, self.device = board, folder, device
        self.lines = folder / "lines"
        self.watcher = folder / "watcher"

    def watched(self) -> dict[str, str]:
        """The environment in which a Python writes what it loads."""
        path = f"{self.watcher}:{os.environ.get('PYTHONPATH', '')}"
        return {**os.environ, "PYTHONPATH": path, loaded.FILE: str(self.lines)}

    def service(self, side: str, *, tree: Path | None = None, watch: bool = False) -> dict[str, Any]:
        """Answers of the service with each profile."""
        before = dict(os.environ)
        if watch:
            os.environ.update(self.watched())
        try:
            return {
                name: answers(profile, self.device, self.folder / f"{side}-{number}", tree)
                for number, (name, profile) in enumerate(PROFILES.items())
            }
        finally:
            os.environ.clear()
            os.environ.update(before)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.read_text().splitlines()]


def opened_while(run: Run) -> tuple[dict[str, Any], frozenset[str] | None, str]:
    """The watched service's answers, the files that this machine opened meanwhile, and how that was seen."""
    try:
        watch = Fanotify(os.getpid())
    except OSError as error:
        return run.service("watched", watch=True), None, f"fanotify is refused here: {error}"
    try:
        said = run.service("watched", watch=True)
    finally:
        paths = watch.finish()
    return said, paths, "fanotify"


def codes_of(path: Path) -> tuple[str, list[tuple[str, str, int]]]:
    """A library's machine code: key, SHA-256 and bytes of each piece."""
    try:
        with open_source(path) as (source, _):
            rows = [
                (key_of(code), hashlib.sha256(code).hexdigest(), len(code)) for code in machine_code(source)
            ]
    except GpuCodeError:
        rows = []
    return path.name, rows


def first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)


def elf_files(tree: Path) -> list[Path]:
    paths = (path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in paths if path.stat().st_size >= ELF_BYTES and first_bytes(path) == ELF]


def judge_modules(run: Run, tree: Path, target: str) -> Used:
    """Whether what was loaded is found in the libraries; what may stay."""
    rows = run.rows()
    seen = {row["digest"]: row for row in rows if "key" in row}
    faults = sorted({row["error"] for row in rows if "error" in row})
    run.board.bar(
        "processes in which CUPTI told", sum("by" in row for row in rows), len(PROFILES), "processes",
        at_least=True, faults=faults,
    )  # fmt: skip
    with ProcessPoolExecutor() as pool:
        of_library = dict(pool.map(codes_of, elf_files(tree)))
    by_key = {key: (name, digest, n) for name, codes in of_library.items() for key, digest, n in codes}
    digests = {digest for codes in of_library.values() for _, digest, _ in codes}
    generated = {row["key"] for row in seen.values() if is_generated(row["functions"], row["such_as"])}
    unknown = [row for row in seen.values() if row["key"] not in by_key.keys() | generated]
    run.board.bar(
        "modules loaded",
        len(seen),
        10,
        "modules",
        at_least=True,
        n_bytes=sum(r["bytes"] for r in seen.values()),
    )
    run.board.bar(
        "modules loaded that no library of torch's stack holds", len(unknown), 0, "modules",
        which=[[row["bytes"], row["functions"], row["such_as"][:1]] for row in unknown[:20]],
    )  # fmt: skip
    run.board.figure(
        "modules loaded that cuBLASLt made as it ran", len(generated - by_key.keys()), "modules", of=len(seen)
    )
    run.board.figure(
        "modules loaded whose bytes are a library's", sum(d in digests for d in seen), "modules", of=len(seen)
    )
    by_library: dict[str, int] = {}
    for row in seen.values():
        if row["key"] in by_key:
            name = by_key[row["key"]][0]
            by_library[name] = by_library.get(name, 0) + 1
    present = sum(len(codes) for codes in of_library.values())
    run.board.figure(f"pieces of code for {target} in the libraries", present, "pieces", loaded=by_library)
    return Used.of({row["key"] for row in seen.values()} - generated, by_key, generated)


def node_of(path: Path) -> Node:
    size = path.stat().st_size
    if path.suffix == ".py":
        return Node("file", size, source=path.read_bytes())
    if first_bytes(path) != ELF:
        return Node("file", size)
    with open_source(path) as (source, _):
        return Node("file", size, needed=needed_libraries(source))


def slim(tree: Path, opened: frozenset[str] | None) -> dict[str, int]:
    """Delete what the runs didn't open and the margin doesn't keep; bytes, by why they stay."""
    files = {path.relative_to(tree).as_posix(): path for path in sorted(tree.rglob("*")) if path.is_file()}
    gone = {"files": 0}
    if opened is not None:
        origins = {
            str(Path(str(each.locate_file(file))).resolve()): file.as_posix()
            for each in distributions()
            for file in each.files or ()
        }
        sources = (BYTECODE.sub(r"\1.py", path) for path in opened)
        observed = {f"{SITE}/{origins[path]}" for path in sources if path in origins}
        nodes = {f"{SITE}/{name}": node_of(path) for name, path in files.items()}
        kept = kept_paths(Tree(nodes, (SITE,)), observed)
        for name, path in files.items():
            if f"{SITE}/{name}" not in kept:
                gone["files"] += path.stat().st_size
                path.unlink()
        for reason in Reason:
            gone[reason.name.lower()] = sum(
                node.n_bytes for name, node in nodes.items() if kept.get(name) is reason
            )
    return gone


def judge_answers(run: Run, name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for profile in PROFILES:
        one, two = before[profile]["bits"], after[profile]["bits"]
        errors = [each[profile]["error"] for each in (before, after) if "error" in each[profile]]
        run.board.bar(
            f"{name}, {profile}: answers that differ",
            sum(a != b for a, b in zip(one, two, strict=False)) + abs(len(one) - len(two)), 0, "answers",
            compared=len(one), errors=errors,
        )  # fmt: skip
        run.board.bar(f"{name}, {profile}: answers", len(two), 1, "answers", at_least=True)


def judge_time(run: Run, before: dict[str, Any], after: dict[str, Any]) -> None:
    """One run each: a figure of noise beside a bar."""
    starts = [after[p]["ready_s"] / before[p]["ready_s"] for p in PROFILES if "ready_s" in after[p]]
    rates = [
        was / now
        for p in PROFILES
        if "per_s" in after[p] and "per_s" in before[p]
        for was, now in zip(before[p]["per_s"], after[p]["per_s"], strict=True)
    ]
    for what, ratios in (("until the service is ready", starts), ("for a request", rates)):
        middle = sorted(ratios)[len(ratios) // 2] if ratios else 99.0
        run.board.bar(
            f"time {what}, watched, of unwatched's", middle, 1.1, "", all=[round(r, 3) for r in ratios]
        )


def judge_fork(run: Run) -> None:
    words = [sys.executable, "-c", FORK, run.device]
    plain = subprocess.run(words, capture_output=True, text=True, check=False)
    watched = subprocess.run(words, capture_output=True, text=True, check=False, env=run.watched())
    run.board.bar(
        "forked children that can't begin CUDA under the watch", int(watched.returncode != plain.returncode),
        0, "children", unwatched=plain.returncode, says=watched.stderr[-300:],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", default="")
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    board = Board("observe-gpu", command="tests/device/run_observe.sh", results=args.out / "bars")
    target = args.target or own_target()
    versions = {each.metadata["Name"]: each.version for each in distributions()}
    board.line({"figure": "machine", "target": target, "gpu": gpu_name(), "versions": versions})
    shutil.rmtree(args.tree, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run = Run(board, args.tree / "runs", args.device)
        run.watcher.mkdir(parents=True)
        run.lines.touch()
        shutil.copyfile(loaded.__file__, run.watcher / "sitecustomize.py")
        judge_fork(run)
        plain = run.service("plain")
        tell("the service ran; again, watched")
        watched, opened, how = opened_while(run)
        board.line({"figure": "files opened", "value": len(opened or ()), "by": how})
        judge_answers(run, "watched", plain, watched)
        judge_time(run, plain, watched)
        tree = args.tree / SITE
        n_before = copy_tree(tree)
        tell(f"copied {n_before / 1e9:.2f} GB")
        pruned = prune_tree(tree, parse_targets(target), strip=True)
        board.figure(
            "the stack for one card", sum_of(tree) / 1e9, "GB", before=n_before, on_disk=bytes_of(tree)
        )
        used = judge_modules(run, tree, target)
        begun = time.monotonic()
        cut = prune_tree(tree, parse_targets(target), used=used, strip=True)
        board.figure(
            "code that wasn't loaded cut", cut.saved_bytes + cut.zeroed_bytes, "bytes",
            seconds=round(time.monotonic() - begun, 1),
            refused=[[row.path, row.reason] for row in (*pruned.refused, *cut.refused)], is_all=used.is_all,
        )  # fmt: skip
        if not used.is_all:
            more = prune_tree(tree, parse_targets(target), used=replace(used, is_all=True), dry_run=True)
            board.figure(
                "code that can't be read, which stays since not all that was loaded was found",
                more.saved_bytes + more.zeroed_bytes, "bytes",
            )  # fmt: skip
        gone = slim(tree, opened)
        board.bar(
            "the stack with the keep-list", sum_of(tree) / 1e9, 1.6, "GB", on_disk=bytes_of(tree), **gone
        )
        rows = sorted(
            ((path.stat().st_size, path.name) for path in tree.rglob("*") if path.is_file()), reverse=True
        )
        board.line({"figure": "largest files of it", "files": rows[:30]})
        tell("slim; the service on it")
        judge_answers(run, "on the slim stack", plain, run.service("slim", tree=tree))
    finally:
        if (args.tree / "runs" / "lines").exists():
            args.out.mkdir(parents=True, exist_ok=True)
            shutil.copy2(args.tree / "runs" / "lines", args.out / "gpu-code.jsonl")
        shutil.rmtree(args.tree, ignore_errors=True)
    return board.finish()


def sum_of(tree: Path) -> int:
    return sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())

"""On a GPU: CUDA libraries that were pruned give the bits of the unpruned. See run_cuda_variant.sh."""

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from board import Board, tell
from service_on_gpu import measured, server

from buildtool.gpucode.target import parse_targets
from buildtool.prune.trees import prune_tree

HERE = Path(__file__).parent
PARTS = 4  # processes for torch's operations, on each side
OURS = re.compile(r"torch|triton|(nvidia|cuda)[-_].+")
# every batch is one request's, as they come one after another; which graphs are kept depends on times
PROFILES = {
    "float32": "capture: false\n",
    "bfloat16": "capture: false\ndtype: bfloat16\n",
    "bfloat16, captured": "dtype: bfloat16\n",
}
REQUESTS = 40
STARTED: list[subprocess.Popen[bytes]] = []
WAIT_S = 150  # for the processes of one side


def distributions() -> list[importlib.metadata.Distribution]:
    """The installed torch, and what it requires of CUDA and Triton."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = ["torch"]
    while waiting:
        name = waiting.pop()
        if name in found or not OURS.fullmatch(name):
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", line)[0].lower() for line in found[name].requires or ()]
    return [found[name] for name in sorted(found)]


def copy_tree(tree: Path) -> int:
    """Copy their files below `tree`; how many bytes."""
    pairs: list[tuple[Path, Path]] = []
    for each in distributions():
        for file in each.files or ():
            if file.parts[0] != ".." and "__pycache__" not in file.parts:
                pairs.append((Path(str(each.locate_file(file))), tree / file))
    for folder in {target.parent for _, target in pairs}:
        folder.mkdir(parents=True, exist_ok=True)

    def copy(pair: tuple[Path, Path]) -> int:
        shutil.copy2(*pair)
        return pair[1].stat().st_size

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(copy, [pair for pair in pairs if pair[0].is_file()]))


def own_target() -> str:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    return "sm_" + subprocess.check_output(query, text=True).splitlines()[0].replace(".", "")


# ---- torch


def started(
    side: str, folder: Path, device: str, seconds: float, tree: Path | None
) -> list[tuple[Path, Any]]:
    """The processes of one side, each with the file that it will write."""
    env = environment(tree) | {
        "PYTORCH_KERNEL_CACHE_PATH": str(folder / side),
        "TRITON_CACHE_DIR": str(folder / side),
    }
    (folder / side).mkdir(parents=True, exist_ok=True)
    running = []
    for part in range(PARTS):
        out, log = folder / f"{side}-{part}.json", folder / f"{side}-{part}.log"
        words = [sys.executable, str(HERE / "torch_results.py"), "--device", device, "--out", str(out)]
        words += [
            "--part",
            f"{part}/{PARTS}",
            "--seconds",
            str(seconds),
            *(["--tree", str(tree)] if tree else []),
        ]
        with log.open("w") as file:
            process = subprocess.Popen(words, env=env, stderr=file, stdout=subprocess.DEVNULL)
        STARTED.append(process)
        running.append((out, process))
    return running


def environment(tree: Path | None) -> dict[str, str]:
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{tree}:{path}"} if tree else dict(os.environ)


def collected(running: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """What the processes wrote, together; one that doesn't end is stopped."""
    results: dict[str, str] = {}
    loaded: set[str] = set()
    elsewhere: set[str] = set()
    left, longest, failed = 0, 0.0, []
    ends = time.monotonic() + WAIT_S
    for out, process in running:
        try:
            process.wait(max(1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode or not out.exists():
            failed.append(
                f"{out.stem} ended with {process.returncode}: {out.with_suffix('.log').read_text()[-800:]}"
            )
            continue
        said = json.loads(out.read_text())
        results |= said["results"]
        left, longest = left + said["left"], max(longest, said["s"])
        loaded |= {*said["loaded"]}
        elsewhere |= {*said["elsewhere"]}
    return {
        "results": results,
        "left": left,
        "loaded": sorted(loaded),
        "elsewhere": sorted(elsewhere),
        "s": longest,
        "failed": failed,
    }


def judge_torch(board: Board, before: dict[str, Any], again: dict[str, Any], after: dict[str, Any]) -> None:
    """Cases whose unpruned result repeats itself, compared with the pruned one's."""
    first, second, pruned = before["results"], again["results"], after["results"]
    common = sorted(first.keys() & second.keys() & pruned.keys())
    steady = [name for name in common if first[name] == second[name]]
    differing = [name for name in steady if pruned[name] != first[name]]
    raising = [name for name in steady if first[name].startswith("raises")]
    board.bar(
        "torch's results after pruning: cases that differ", len(differing), 0, "cases", compared=len(steady),
        computed=len(steady) - len(raising), first=[[n, first[n], pruned[n]] for n in differing[:20]],
    )  # fmt: skip
    share = (len(steady) - len(raising)) / max(1, len(common))
    failed = [*before["failed"], *again["failed"], *after["failed"]]
    board.bar(
        "processes of torch's results that failed", len(failed), 0, "processes", of=3 * PARTS, failed=failed
    )
    board.bar("cases that compute and repeat themselves", share, 0.9, "of those that ran", at_least=True)
    ran = len(common) / max(1, len(common) + max(before["left"], again["left"], after["left"]))
    board.bar("cases that there was time for", ran, 0.95, "of all", at_least=True, cases=len(common))
    board.bar(
        "libraries of the pruned side loaded from elsewhere", len(after["elsewhere"]), 0, "libraries",
        from_tree=len(after["loaded"]), first=after["elsewhere"][:5],
    )  # fmt: skip
    board.line({
        "raising": {n: first[n] for n in raising}, "not_steady": [n for n in common if n not in {*steady}],
        "seconds": [before["s"], again["s"], after["s"]],
    })  # fmt: skip


# ---- the service


def requests() -> Iterator[bytes]:
    """Bodies with 1 to 8 rows of 8 to 128 tokens; the same in every run."""
    rng = random.Random(7)
    for _ in range(REQUESTS):
        n_tokens = rng.randint(8, 128)
        rows = [
            [101, *(rng.randrange(1000, 30000) for _ in range(n_tokens - 2)), 102]
            for _ in range(rng.randint(1, 8))
        ]
        ids = {"name": "input_ids", "shape": [len(rows), n_tokens], "datatype": "INT64", "data": rows}
        outputs = [{"name": "probabilities", "parameters": {"binary_data": True}}]
        yield json.dumps({"inputs": [ids], "outputs": outputs}).encode()


def answers(profile: str, device: str, folder: Path, tree: Path | None) -> dict[str, Any]:
    """The bits of every answer of a service with this profile, and requests per second."""
    kept = dict(os.environ)
    folder.mkdir(parents=True)
    os.environ.update(environment(tree))
    begun = time.monotonic()
    try:
        with server(f"device: {device}\nmax_batch_tokens: 2048\n{profile}", folder) as port:
            ready = time.monotonic() - begun
            bits = []
            for body in requests():
                request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/finbert/infer", body)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    n_json = int(answer.headers["Inference-Header-Content-Length"])
                    bits.append(hashlib.sha256(answer.read()[n_json:]).hexdigest())
            rates = [measured(port, 32, tokens, 0.5)["per_s"] for tokens in (12, "mixed")]
            return {"bits": bits, "ready_s": round(ready, 1), "per_s": rates}
    except (OSError, RuntimeError, TypeError) as error:
        return {"bits": [], "error": str(error)[-1500:]}
    finally:
        os.environ.clear()
        os.environ.update(kept)


def judge_service(board: Board, device: str, folder: Path, tree: Path) -> None:
    """Answers that repeat themselves unpruned, compared with those of the pruned libraries."""
    for name, profile in PROFILES.items():
        slug = re.sub(r"\W+", "-", name)
        sides = {"before": None, "again": None, "after": tree}
        runs = [answers(profile, device, folder / f"service-{slug}-{side}", at) for side, at in sides.items()]
        rows = list(zip(*(run["bits"] for run in runs), strict=False))
        steady = [row for row in rows if row[0] == row[1]]
        board.bar(
            f"the service's answers after pruning, {name}: answers that differ",
            sum(row[0] != row[2] for row in steady), 0, "answers",
            compared=len(steady), of=REQUESTS, different_requests=len({row[0] for row in rows}),
            runs=[{key: value for key, value in run.items() if key != "bits"} for run in runs],
        )  # fmt: skip
        board.bar(f"the service's answers compared, {name}", len(steady), REQUESTS, "answers", at_least=True)


# ---- the prune


def judge_prune(board: Board, tree: Path, target: str) -> None:
    n_before = bytes_of(tree)
    begun = time.monotonic()
    result = prune_tree(tree, parse_targets(target))
    took = time.monotonic() - begun
    n_after = bytes_of(tree)
    kept = sorted({code for cut in result.pruned for code in cut.kept_bytes})
    board.figure(
        "bytes after pruning, of those before", n_after / n_before, "", before=n_before, after=n_after,
        kept=kept, cut=len(result.pruned), seconds=round(took, 1),
        untouched=[each.path for each in result.untouched],
        refused=[[each.path, each.reason] for each in result.refused],
    )  # fmt: skip
    board.bar("libraries that were cut", len(result.pruned), 10, "libraries", at_least=True)


def bytes_of(tree: Path) -> int:
    """What the files take on the disk; holes take nothing."""
    return sum(path.lstat().st_blocks * 512 for path in tree.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--target", default="")
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    board = Board("cuda-variant", command="tests/device/run_cuda_variant.sh", results=args.out / "bars")
    target = args.target or own_target()
    versions = {each.metadata["Name"]: each.version for each in distributions()}
    board.line(
        {
            "figure": "machine",
            "device": args.device,
            "target": target,
            "gpu": gpu_name(),
            "versions": versions,
        }
    )
    shutil.rmtree(args.tree, ignore_errors=True)
    folder = args.tree / "runs"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        folder.mkdir(parents=True)
        before = started("before", folder, args.device, args.seconds, None)
        tree = args.tree / "site-packages"
        n_bytes = copy_tree(tree)
        tell(f"copied {n_bytes / 1e9:.2f} GB")
        judge_prune(board, tree, target)
        first = collected(before)
        tell("pruned; torch's results again, unpruned and pruned")
        again = started("again", folder, args.device, args.seconds, None)
        after = started("after", folder, args.device, args.seconds, tree)
        judge_torch(board, first, collected(again), collected(after))
        judge_service(board, args.device, folder, tree)
    finally:
        for process in STARTED:
            process.kill()
        shutil.rmtree(args.tree, ignore_errors=True)
    return board.finish()


def gpu_name() -> str:
    try:
        return subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines()[0].partition(" (")[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


if __name__ == "__main__":
    sys.exit(main())

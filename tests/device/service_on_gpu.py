"""The service on this machine's GPU: rates, latencies, memory and accuracy. See run_service.sh."""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from service_load import closed_loop, mixed, quantile, token_ids

ROOM = "max_in_flight: 512\nmax_connections: 1024\nmax_queue_tokens: 200000\nmax_wait_ms: 2\n"
BATCHED, SINGLE = "max_batch_tokens: 16384\n", "max_batch_tokens: 1\n"


@contextmanager
def server(profile: str, folder: Path) -> Iterator[int]:
    """A service with this profile; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "application-gpu.yaml").write_text(profile)
    env = {
        **os.environ,
        "WEIR_PROFILES_DIR": str(folder),
        "APP_PROFILE": "gpu",
        "WEIR_MODEL_DIR": str(folder),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "service"], env=env | {"WEIR_LISTEN": f"127.0.0.1:{port}"}, stderr=log
        )
    try:
        ends = time.monotonic() + 90
        while not get(port, "/v2/health/ready", within_s=2):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError((folder / "log").read_text()[-3000:])
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def get(port: int, path: str, *, within_s: float = 30) -> str:
    """The body and a full stop, or nothing where the answer isn't 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=within_s) as answer:
            return answer.read().decode() + "."
    except OSError:
        return ""


def facts(port: int) -> dict[str, Any]:
    """What the model says of itself, and the memory that it takes."""
    said = json.loads(get(port, "/v2/models/finbert")[:-1])["parameters"]
    lines = [line for line in get(port, "/metrics").splitlines() if line.startswith("weir_memory_bytes")]
    memory = {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}
    counts = [line for line in get(port, "/metrics").splitlines() if line.startswith("weir_model_total")]
    return {
        "dtype": said["dtype"],
        "largest_difference": said["largest_difference_from_float32"],
        "description": said["device_description"],
        "memory": memory,
        "counts": {line.split('"')[3]: int(float(line.split()[-1])) for line in counts},
    }


def measured(port: int, n_callers: int, tokens: int | str, seconds: float) -> dict[str, Any]:
    """Rate and latency of callers in a closed loop."""
    body = token_ids(mixed() if isinstance(tokens, str) else tokens)
    asyncio.run(closed_loop(port, n_callers, 0.5, body))
    result = asyncio.run(closed_loop(port, n_callers, seconds, body))
    row = {"callers": n_callers, "tokens": tokens, "per_s": round(result.rate, 1), "answers": result.counts()}
    if result.ok:
        row |= {
            "p50_ms": round(1000 * quantile(result.ok, 0.5), 2),
            "p99_ms": round(1000 * quantile(result.ok, 0.99), 2),
            "added_p50_ms": round(1000 * quantile(result.overhead, 0.5), 2),
            "added_p99_ms": round(1000 * quantile(result.overhead, 0.99), 2),
        }
    return row


def main() -> int:
    """Run every profile; a profile that fails is a row with its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="runs whose name this regular expression finds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    base = f"device: {args.device}\n{ROOM}"
    placed = f"placement: auto\nmachine: {args.machine}\nvram_budget: 350 MB\n"
    eager, half = "capture: false\n", "dtype: bfloat16\n"
    runs = {
        "float32 one at a time, uncaptured": base + SINGLE + eager,
        "float32 one at a time": base + SINGLE,
        "float32 uncaptured": base + BATCHED + eager,
        "float32": base + BATCHED,
        "bfloat16 uncaptured": base + BATCHED + half + eager,
        "bfloat16": base + BATCHED + half,
        "float16": base + BATCHED + "dtype: float16\n",
        "float32 placed in 350 MB": base + "max_batch_tokens: 1024\n" + placed,
    }
    runs = {name: profile for name, profile in runs.items() if re.search(args.only, name)}
    found: list[dict[str, Any]] = []
    for name, profile in runs.items():
        with TemporaryDirectory() as folder:
            found.append(run(name, profile, Path(folder), args.seconds))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "service-gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(name: str, profile: str, folder: Path, seconds: float) -> dict[str, Any]:
    """One profile's rows, printed as they come."""
    row: dict[str, Any] = {"run": name, "profile": profile}
    try:
        with server(profile, folder) as port:
            row |= facts(port)
            print(name, json.dumps(facts(port)), flush=True)
            row["rows"] = []
            for callers, tokens in ((1, 12), (32, 12), (32, 32), (32, 128), (32, "mixed"), (256, 12)):
                row["rows"].append(measured(port, callers, tokens, seconds))
                print("  ", json.dumps(row["rows"][-1]), flush=True)
            after = facts(port)
            row["memory_after"], row["counts"] = after["memory"], after["counts"]
            print("  ", json.dumps(row["counts"]), json.dumps(row["memory_after"]), flush=True)
        row["log"] = [line for line in (folder / "log").read_text().splitlines() if "captur" in line]
        print("\n".join(row["log"]), flush=True)
    except (RuntimeError, OSError, ValueError) as error:
        row["error"] = str(error)
        print(name, "failed:", error, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())

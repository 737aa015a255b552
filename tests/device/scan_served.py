"""Loads the service on this machine's GPU and adds that to the report of a direct scan; for run_scan.sh."""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from service_on_gpu import BATCHED, ROOM, server

TOKENS = 128  # as the direct scan's encoder has


def main() -> int:
    """The exit code of the served scan."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    with (
        TemporaryDirectory() as folder,
        server(f"device: {args.device}\n{ROOM}{BATCHED}", Path(folder)) as port,
    ):
        words = ["--url", f"http://127.0.0.1:{port}", "--dim", str(TOKENS), "--most-callers", "64"]
        command = [sys.executable, "-m", "probes", "throughput", *words, "--quick-load", "--into", args.into]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

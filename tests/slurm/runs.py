"""Jobs of a small model that tests and the bench hand to a Slurm by `weir launch`."""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cluster import ROOT, Cluster

PYTHON = Path(sys.executable).parent
HOST = ROOT / ".venv" / "bin" / "python"  # which draws pages
STEPS = 32  # of an epoch: 512 samples, 2 ranks, 8 at once


@dataclass
class Launched:
    """A `weir launch` that runs or has ended."""

    process: "subprocess.Popen[str]"
    out: Path
    lines: list[str] = field(default_factory=list)

    @property
    def job_id(self) -> str:
        """Waits for it."""
        log = self.out / "launch.log"
        end = time.monotonic() + 60
        while not (found := re.search(r"submitted as Slurm's job (\d+)", log.read_text())):
            if time.monotonic() > end or self.process.poll() is not None:
                raise TimeoutError(log.read_text())
            time.sleep(0.05)
        return found[1]

    def ended(self, seconds: float = 300) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    @property
    def text(self) -> str:
        return (self.out / "launch.log").read_text()

    def rank(self, number: int, folder: str = ".") -> dict[str, Any]:
        """What a rank has reported."""
        return json.loads((self.out / folder / f"rank-{number}.json").read_text())

    @property
    def step(self) -> int:
        """The step of the last checkpoint; 0 before."""
        path = self.out / "checkpoint.pt"
        return torch.load(path, weights_only=True)["place"]["step"] if path.exists() else 0


def launched(cluster: Cluster, out: Path, *words: str, command: tuple[str, ...] = ()) -> Launched:
    """Start `weir launch` on the cluster; by default for two nodes that train the small model."""
    out.mkdir(parents=True, exist_ok=True)
    line = [
        str(HOST if HOST.exists() else PYTHON / "python"),
        "-m",
        "buildtool",
        "launch",
        "--engine",
        "slurm",
        "--out",
        str(out),
    ]
    environment = {**cluster.environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'slurm'}"}
    with (out / "launch.log").open("w") as log:
        process = subprocess.Popen(
            [
                *line,
                "--env",
                f"MARKS={out}",
                "--port",
                str(cluster.rendezvous),
                *words,
                "--",
                *(command or trained()),
            ],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return Launched(process, out)


def trained(*more: str, epochs: int = 4, batch: str = "8", timeout: int = 600) -> tuple[str, ...]:
    """The worker's command."""
    worker = (
        str(PYTHON / "python"),
        "-m",
        "probes.training.worker",
        "small:model",
        "--data",
        "small:samples",
    )
    numbers = ("--device", "cpu", "--batch", batch, "--epochs", str(epochs), "--timeout", str(timeout))
    return (*worker, *numbers, "--out", "{out}", "--resume", *more)


def workers(cluster: Cluster, node: str) -> list[int]:
    """The ranks that run on a node."""
    found = []
    for pid in cluster.processes(node):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "probes.training.worker" in words and "srun" not in words[0] and "launch" not in words:
            found.append(pid)
    return found


def training(cluster: Cluster, run: Launched, restarts: int = 0) -> None:
    """Wait until a rank has asked for its first sample since this start."""
    mark = run.out / f"begun-{restarts}"
    cluster.wait(lambda: mark.exists() or run.process.poll() is not None, "the first sample")

"""Containers of the CPU image for bench_service.py: the service, its forward pass alone, one that breaks."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

IMAGE = os.environ.get("WEIR_CPU_IMAGE") or "weir/cpu:latest"
EXTRAS = os.environ.get("WEIR_EXTRAS_IMAGE") or "weir/cpu-extras:latest"
# Nothing but the model's pass, in the program's first thread, with libgomp's own settings: the fastest way
BARE = """
import json, sys, time
from pathlib import Path
from service.inference.classifier import Encoded
from service.inference.model import load
from service.settings import Limits, Settings
model = load(Settings("bare", "cpu", Path("/models"), "random", "x", 1, Limits()), "finbert", Path("/models"))
print("ready", flush=True)
for line in sys.stdin:
    seconds, n_tokens = float(line.split()[0]), int(line.split()[1])
    row = Encoded((101, *range(1000, 1000 + n_tokens - 2), 102))
    took, ends = [], time.perf_counter() + seconds
    while (begun := time.perf_counter()) < ends or not took:
        model.classify([row])
        took.append(time.perf_counter() - begun)
    print(json.dumps(took), flush=True)
"""
# The service, whose device fails while /faults/broken is there, and hangs while /faults/hangs is
BREAKS = """
import os, time
from service.cli import main
from service.errors import DeviceFault
from service.inference.model import TorchClassifier
works = TorchClassifier._compute
def breaks(self, task, batch):
    while os.path.exists("/faults/hangs"):
        time.sleep(0.05)
    if os.path.exists("/faults/broken"):
        raise DeviceFault("a fault that the bench injected")
    return works(self, task, batch)
TorchClassifier._compute = breaks
os._exit(main(os.environ))
"""


@dataclass(frozen=True)
class Server:
    """A container of the service and its ports."""

    name: str
    port: int
    rpc: int  # of gRPC, where the image has it

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics without labels, by name."""
        return {name: value for name, value in self._samples() if "{" not in name}

    def failed(self) -> int:
        """How many requests it has answered with a 500, over any protocol, by its own count."""
        return int(sum(value for name, value in self._samples() if 'status="500"' in name))

    def _samples(self) -> list[tuple[str, float]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as page:
            lines = page.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return [(name, float(value)) for name, value in pairs]

    def pid(self) -> str:
        """The container's first process, which another start would replace."""
        return docker("inspect", "-f", "{{.State.Pid}}", self.name)

    def status(self, path: str) -> int:
        """The status of a GET; 0 where nobody answers within 5 s."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ready(self, within_s: float = 120) -> None:
        """Wait until it is ready. Raises RuntimeError when it isn't in time."""
        ends = time.monotonic() + within_s
        while self.status("/v2/health/ready") != 200:
            if time.monotonic() > ends:
                raise RuntimeError(f"{self.name} isn't ready: {docker('logs', '--tail', '5', self.name)}")
            time.sleep(0.03)


def docker(*words: str) -> str:
    """What docker prints. Raises RuntimeError when it fails."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {words[0]}: {done.stderr.strip()}")
    return done.stdout + done.stderr


@contextmanager
def server(
    folder: Path,
    profile: str,
    *,
    lane: int = 0,
    mounts: Sequence[str] = (),
    program: str = "",
    checked: bool = False,
    image: str = IMAGE,
) -> Iterator[Server]:
    """A container with the profile, on the host's network: no proxy stands in between.

    Only where it is `checked` does Docker look after its health, which starts a process on the CPUs that are
    measured, every second until it is healthy. Bytecode is kept in `folder`, so that starting it again
    doesn't compile torch's modules again.
    """
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        port, rpc = free.getsockname()[1], other.getsockname()[1]
    name = f"bench-service-{profile}-{lane}-{os.getpid()}"
    command = ["python3", "-c", program] if program else []
    docker(
        *("run", "-d", "--name", name, "--network", "host", "--read-only", "--tmpfs", "/tmp"),
        *(() if checked else ("--no-healthcheck",)),
        *("-v", f"{folder}:/profiles:ro", "-e", "WEIR_PROFILES_DIR=/profiles"),
        *("-v", f"{folder / 'bytecode'}:/bytecode", "-e", "PYTHONPYCACHEPREFIX=/bytecode"),
        *("-e", "PYTHONDONTWRITEBYTECODE="),
        *(word for each in mounts for word in ("-v", each)),
        *("-e", f"APP_PROFILE={profile}", "-e", f"WEIR_LISTEN=127.0.0.1:{port}"),
        *(("-e", f"WEIR_GRPC_LISTEN=127.0.0.1:{rpc}") if image == EXTRAS else ()),
        *(image, *command),
    )
    try:
        made = Server(name, port, rpc)
        made.ready()
        yield made
    finally:
        docker("rm", "-f", name)


class Bare:
    """The forward pass alone, in a container of the same image."""

    def __enter__(self) -> "Bare":
        name = f"bench-service-bare-{os.getpid()}"
        command = ["docker", "run", "--rm", "-i", "--name", name, "--network", "none", "--no-healthcheck"]
        command += [IMAGE, "python3", "-c", BARE]
        self._name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._line()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)

    def pid(self) -> int:
        """Its first process."""
        return int(docker("inspect", "-f", "{{.State.Pid}}", self._name))

    def passes(self, seconds: float, n_tokens: int) -> list[float]:
        """How long each pass took, one after the other for so long."""
        assert self._process.stdin
        self._process.stdin.write(f"{seconds} {n_tokens}\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

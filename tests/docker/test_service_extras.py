"""The image with gRPC and OpenTelemetry: built here, held to its budget, and asked by Triton's own client."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from buildtool.build import catalog

ROOT = Path(__file__).parents[2]
IMAGE = "weir/cpu-extras:latest"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audit of the image, which a build makes that finds its layers in the cache after the first time."""
    reports = tmp_path_factory.mktemp("reports")
    build = [sys.executable, "-m", "buildtool", "build", "cpu-extras", "--reports", str(reports)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=900)
    return reports / "cpu-extras.json"


@pytest.fixture(scope="module")
def container(report: Path) -> Iterator[str]:
    """A running service over gRPC, as compose would start it; its id."""
    assert report.is_file()
    options = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true"]
    options += ["--tmpfs=/tmp:uid=10001,gid=10001", "-e", "WEIR_GRPC_LISTEN=0.0.0.0:8001"]
    made = docker("run", "-d", "-p", "127.0.0.1:0:8001", *options, IMAGE).stdout.strip()
    try:
        yield made
    finally:
        docker("rm", "-f", made)


def docker(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *args], capture_output=True, text=True, check=check, timeout=300)


def test_the_image_keeps_its_budget(report: Path) -> None:
    budget = catalog.load().select(("cpu-extras",))[0].budget.unpacked_bytes
    assert budget is not None
    assert json.loads(report.read_text())["totals"]["unpacked_bytes"] <= budget


def test_tritonclient_over_grpc_is_answered_by_the_container(container: str) -> None:
    address = docker("port", container, "8001").stdout.splitlines()[0]
    with triton.InferenceServerClient(address) as client:
        ends = time.monotonic() + 300
        while not ready(client):
            assert time.monotonic() < ends, docker("logs", container, check=False).stderr[-2000:]
            time.sleep(0.3)
        text = triton.InferInput("text", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"Profits rose."], dtype=np.object_))
        answer = client.infer("finbert", [text])
    assert answer.as_numpy("probabilities").sum() == pytest.approx(1, abs=1e-5)


def ready(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False


def test_the_small_image_says_which_one_has_grpc() -> None:
    small = os.environ.get("WEIR_CPU_IMAGE") or "weir/cpu:latest"
    done = docker("run", "--rm", "-e", "WEIR_GRPC_LISTEN=0.0.0.0:8001", small, check=False)
    assert done.returncode == 3
    assert "isn't installed here\n  use an image with gRPC (make images VARIANTS=cpu-extras)" in done.stderr

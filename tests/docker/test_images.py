"""The two images that `make images` made: their size, what they hold, and what must not be in them."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from buildtool.build import catalog
from buildtool.engine import proof
from buildtool.engine.client import Engine

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports" / "images"
Report = dict[str, dict[str, object]]
Bar = Callable[..., None]


@pytest.fixture
def bar(capsys: pytest.CaptureFixture[str]) -> Bar:
    """Tells a bar of the project as one JSON line, and holds it."""

    def hold(name: str, value: float, limit: float, unit: str, *, at_least: bool = False) -> None:
        ok = value >= limit if at_least else value <= limit
        with capsys.disabled():
            print("\n" + json.dumps({"bar": name, "value": value, "limit": limit, "unit": unit, "ok": ok}))
        assert ok, f"{name}: {value} against {limit} {unit}"

    return hold


def report(variant: str) -> Report:
    data: Report = json.loads((REPORTS / f"{variant}.json").read_text())
    return data


def shell(ref: str, script: str) -> str:
    done = subprocess.run(
        ["docker", "run", "--rm", "--network=none", "--entrypoint=sh", ref, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_cpu_image_is_small(bar: Bar) -> None:
    totals = report("cpu")["totals"]
    bar("cpu-unpacked", int(str(totals["unpacked_bytes"])), 700_000_000, "bytes unpacked")
    if Engine().info().containerd_store:
        bar("cpu-compressed", int(str(totals["stored_bytes"])), 320_000_000, "bytes stored")
    else:  # it keeps layers unpacked, so what a registry would store isn't known from it
        assert totals["stored_bytes"] is None
        assert totals["stored_reason"]
        assert report("cpu")["budget"]["stored"]["verdict"] == "unknown"  # type: ignore[index]


def test_the_cpu_image_holds_not_a_byte_of_cuda() -> None:
    found = shell(
        "weir/cpu:latest",
        "find / -xdev 2>/dev/null | grep -iE 'nvidia|libcu(da|blas|dnn|fft|sparse)|triton/' || true",
    )
    own = re.compile(r"/opt/weir/app/probes/\S+\.py")  # reads an NVIDIA card where there is one
    assert [path for path in found.split() if not own.fullmatch(path)] == []
    assert report("cpu")["gpu_code"]["by_target"] == {}


STALE = """
import importlib.util, os, sys
import torch
files = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]]
sources = [file for file in files if file.startswith("/opt/weir/lib/torch/") and file.endswith(".py")]
def valid(source):
    cache = importlib.util.cache_from_source(source)
    head = open(cache, "rb").read(16) if os.path.exists(cache) else b""
    status = os.stat(source)
    return head[8:] == int(status.st_mtime).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
stale = [source for source in sources if not valid(source)]
print(len(sources), len(stale), *stale[:9])
"""


def test_no_container_compiles_torch_again() -> None:
    said = shell("weir/cpu:latest", f"python3 -W ignore -c '{STALE}'").split()
    assert int(said[0]) > 500
    assert int(said[1]) == 0, said


def test_the_report_describes_the_image_that_the_engine_holds() -> None:
    """containerd's store identifies an image by its manifest, the classic one by its config."""
    engine = Engine()
    identity = "digest" if engine.info().containerd_store else "config_digest"
    for variant in ("cpu", "rocm"):
        held = engine.inspect(f"weir/{variant}:latest")
        assert held
        assert report(variant)["image"][identity] == held["Id"]


def test_the_report_has_the_keys_that_others_rely_on() -> None:
    data = report("rocm")
    assert data["schema_version"]
    assert {"ref", "digest"} <= set(data["image"])
    assert {"unpacked_bytes", "stored_bytes"} <= set(data["totals"])
    assert {"limit_bytes", "verdict"} <= set(data["budget"])
    assert data["layers"]
    assert data["packages"]
    for finding in data["findings"]:
        assert {"id", "severity", "bytes", "paths", "remedy"} <= set(finding)


def test_the_rocm_image_holds_code_for_its_cards_alone() -> None:
    by_target = report("rocm")["gpu_code"]["by_target"]
    labels = Engine().inspect("weir/rocm:latest")["Config"]["Labels"]  # type: ignore[index]
    assert labels["io.weir.pruned"] == "yes"
    large = {target for target, n_bytes in by_target.items() if int(str(n_bytes)) > 100_000}
    assert large == set(labels["io.weir.gpu-targets"].split(","))  # the runtime's few kernels are for all
    assert all(int(str(by_target[target])) > 100_000_000 for target in large)
    assert not {"foreign-gfx", "foreign-gfx-in-libraries"} & {f["id"] for f in report("rocm")["findings"]}


def test_the_rocm_image_says_that_its_torch_has_no_gpu_kernels() -> None:
    labels = Engine().inspect("weir/rocm:latest")["Config"]["Labels"]  # type: ignore[index]
    if labels["io.weir.source.torch"] != "debian-rocm":
        pytest.fail("built from ROCm wheels: this machine reaches an index; extend this test to prove them")
    assert labels["io.weir.torch.build"] == "cpu"
    assert "torch-without-gpu-kernels" in {finding["id"] for finding in report("rocm")["findings"]}


def test_rocminfo_and_torch_run_in_the_rocm_image() -> None:
    ran = Engine().run("weir/rocm:latest", proof.COMMAND)
    facts = json.loads(ran.stdout.split(proof.MARK)[1])
    assert facts["rocminfo"]["present"]
    assert "ROCk module is NOT loaded" in facts["rocminfo"]["said"] or facts["rocminfo"]["exit_code"] == 0
    assert facts["torch"]["product_ok"]
    assert facts["uid"] == 10001


@pytest.mark.parametrize("variant", ["cpu", "rocm"])
def test_nothing_of_the_host_is_inside(variant: str) -> None:
    script = (
        "cat /etc/apt/sources.list /etc/pip.conf /root/.config/pip/pip.conf /root/.netrc 2>/dev/null; env"
    )
    said = shell(f"weir/{variant}:latest", script)
    assert "http" not in said
    assert "PIP_" not in said
    labels = Engine().inspect(f"weir/{variant}:latest")["Config"]["Labels"]  # type: ignore[index]
    assert not [value for value in labels.values() if "://" in value]


@pytest.mark.parametrize("variant", ["cpu", "rocm"])
def test_no_file_is_newer_than_the_catalog_says(variant: str) -> None:
    epoch = catalog.load().source_date_epoch
    found = shell(f"weir/{variant}:latest", f"find / -xdev -newermt @{epoch} 2>/dev/null").split()
    made_by_the_engine = ("/etc", "/dev", "/proc", "/sys", "/.dockerenv")
    assert [path for path in found if path != "/" and not path.startswith(made_by_the_engine)] == []


@pytest.mark.parametrize("variant", ["cpu", "rocm"])
def test_the_image_is_made_to_be_served(variant: str) -> None:
    config = Engine().inspect(f"weir/{variant}:latest")["Config"]  # type: ignore[index]
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "service.health"]
    assert config["Labels"]["org.opencontainers.image.title"] == f"weir/{variant}"
    tools = "gcc|cc1|ld\\.bfd|apt-get|pip3?"
    assert shell(f"weir/{variant}:latest", f"ls /usr/bin | grep -xE '{tools}' || true").strip() == ""

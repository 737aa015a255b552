"""The two real images, pruned and built again as a whole: what takes minutes, and is in `make thorough`.

`make test` prunes small images and two of the ROCm image's libraries (test_prune_hostile, test_prune_image),
and every build of `weir/rocm` prunes its root file system.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildtool.engine import proof
from buildtool.engine.client import Engine
from buildtool.prune.manifest import IMAGE_PATH

ROOT = Path(__file__).parents[2]
CARD = "gfx906"
COPY = "weir/rocm:test-pruned"
LIMIT_BYTES = 1_500_000_000
SERVE = """
python3 -m service 2>/tmp/log & service=$!
for _ in $(seq 200); do python3 -m service.health && break; sleep 1; done
python3 -m service.health && grep -o 'ready weights=[a-z]*' /tmp/log; kill $service
"""


def buildtool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".venv/bin/python"), "-m", "buildtool", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def inside(ref: str, script: str) -> str:
    command = [
        "docker",
        "run",
        "--rm",
        "--network=none",
        "--read-only",
        "--tmpfs=/tmp",
        ref,
        "sh",
        "-c",
        script,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def labels(ref: str) -> dict[str, str]:
    record = Engine().inspect(ref)
    assert record
    return dict(record["Config"]["Labels"])


@pytest.fixture(scope="module")
def copy() -> Iterator[str]:
    """The rocm image, pruned to one of its three cards; removed in the end."""
    done = buildtool("prune", "weir/rocm:latest", "--targets", CARD, "--tag", COPY)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    yield COPY
    Engine().remove_tag(COPY)


@pytest.fixture(scope="module")
def report(copy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("reports")
    done = buildtool("audit", copy, "--json", str(folder / "copy.json"))
    assert done.returncode == 0, done.stderr
    return dict(json.loads((folder / "copy.json").read_text()))


def test_a_copy_for_one_card_is_small(report: dict[str, dict[str, object]]) -> None:
    n_bytes = int(str(report["totals"]["unpacked_bytes"]))
    assert n_bytes <= LIMIT_BYTES


def test_it_holds_code_for_that_card_alone(report: dict[str, dict[str, object]]) -> None:
    by_target = report["gpu_code"]["by_target"]
    assert isinstance(by_target, dict)
    assert set(by_target) == {CARD}


def test_its_labels_and_its_manifest_tell_what_went(copy: str) -> None:
    assert labels(copy)["io.weir.gpu-targets"] == CARD
    assert labels(copy)["io.weir.pruned"] == "yes"
    manifest = json.loads(inside(copy, f"cat /{IMAGE_PATH}"))
    assert manifest["targets"] == [CARD]
    assert [run["archive"] for run in manifest["runs"]][-1] == "weir/rocm:latest"
    assert len(manifest["runs"]) == 2  # the build's, and this one
    assert not [run for run in manifest["runs"] if run["refused"]]


def test_its_configuration_is_the_originals(copy: str) -> None:
    old, new = (Engine().inspect(ref) for ref in ("weir/rocm:latest", copy))
    assert old
    assert new
    for key in ("Env", "User", "ExposedPorts", "Healthcheck", "Cmd", "Entrypoint", "WorkingDir"):
        assert (old["Config"].get(key) or None) == (new["Config"].get(key) or None), key
    assert len(new["RootFS"]["Layers"]) == 1


def test_it_serves_and_probes(copy: str) -> None:
    assert "ready weights=" in inside(copy, SERVE)
    assert "report:" in inside(copy, "python3 -m probes run transfer --quick --out /tmp/r")
    facts = proof.facts_of(Engine().run(copy, proof.COMMAND).stdout)
    assert facts == proof.facts_of(Engine().run("weir/rocm:latest", proof.COMMAND).stdout)


def test_owners_modes_and_links_are_the_originals(copy: str) -> None:
    script = "find / -xdev -not -path '/proc*' -not -path '/sys*' -not -path '/dev*' -not -path '/tmp*' "
    script += "-not -name weir-prune.json -not -name '*gfx*' "
    script += r"\( -type d -printf '%p %m %U %G\n' -o -printf '%p %y %m %U %G %l %n\n' \) | sort | sha256sum"
    assert inside(copy, script) == inside("weir/rocm:latest", script) != ""


def test_a_second_build_without_cache_has_the_same_digest() -> None:
    before = Engine().inspect("weir/cpu:latest")
    build = [str(ROOT / ".venv/bin/python"), "-m", "buildtool", "build", "cpu", "--no-cache", "--no-audit"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    after = Engine().inspect("weir/cpu:latest")
    assert before
    assert after
    assert before["Id"] == after["Id"]

"""The two real images, pruned and built again as a whole: what takes minutes, and is in `make thorough`.

`make test` prunes small images and two of the ROCm image's libraries (test_prune_hostile, test_prune_image),
and every build of `weir/rocm` prunes its root file system.
"""

import json
import mmap
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildtool.engine import proof
from buildtool.engine.client import Engine
from buildtool.prune.manifest import IMAGE_PATH

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports" / "images"
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


MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def code_by_target(path: Path) -> Counter[str]:
    """Bytes of GPU code in every bundle of an uncompressed tar, by the bundles' own headers.

    A header is the magic, the number of entries, and for each its offset, its size, its name's length and its
    name, whose end is the target.
    """
    found: Counter[str] = Counter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(MAGIC)
        while at >= 0:
            here = at + len(MAGIC)
            (n_entries,) = struct.unpack_from("<Q", data, here)
            here += 8
            for _ in range(min(n_entries, 100)):
                _, n_bytes, n_chars = struct.unpack_from("<3Q", data, here)
                if n_chars > 200:  # the magic alone, in a program that writes bundles
                    break
                name = data[here + 24 : here + 24 + n_chars]
                here += 24 + n_chars
                if target := re.search(rb"--(gfx[0-9a-f]+)", name):
                    found[target[1].decode()] += n_bytes
            at = data.find(MAGIC, at + 1)
    return found


def test_the_rocm_image_was_pruned_from_code_for_eight_cards_and_more() -> None:
    """Counted in the unpruned root file system, without our own reader or the manifest of the prune."""
    pin = json.loads((REPORTS / "rocm.build.json").read_text())["inputs"]["base"]["pin"]
    (kept,) = [p for p in (ROOT / ".weir/rootfs").glob("*.sha256") if p.read_text().strip() == pin]
    before = code_by_target(kept.with_suffix(".tar"))
    large = {target for target, n_bytes in before.items() if n_bytes > 100_000_000}
    assert len(large) >= 8
    listed: set[str] = set()
    for run in json.loads(inside("weir/rocm:latest", f"cat /{IMAGE_PATH}"))["runs"]:
        for item in run["pruned"]:
            listed |= {target.partition(":")[0] for target in item["removed_bytes"]}
    held = set(json.loads((REPORTS / "rocm.json").read_text())["gpu_code"]["by_target"])
    assert large - held <= listed, "cut, and not in the manifest"


def test_a_second_build_without_cache_has_the_same_digest() -> None:
    before = Engine().inspect("weir/cpu:latest")
    build = [str(ROOT / ".venv/bin/python"), "-m", "buildtool", "build", "cpu", "--no-cache", "--no-audit"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    after = Engine().inspect("weir/cpu:latest")
    assert before
    assert after
    assert before["Id"] == after["Id"]

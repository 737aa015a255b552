"""Images for one card: by a build that asks for it, and by pruning an image that the engine holds."""

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
# two of its libraries, for what doesn't depend on how large an image is
FEW = "t-prune-image/few:latest"
LIBRARIES = "/usr/lib/x86_64-linux-gnu/"
FEW_OF = f"""
FROM scratch
COPY --from=weir/rocm:latest {LIBRARIES}librocblas.so.0.1 {LIBRARIES}librocfft.so.0.1 {LIBRARIES}
"""
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
def copy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rocm image, pruned to one of its three cards; removed in the end."""
    done = buildtool("prune", "weir/rocm:latest", "--targets", CARD, "--tag", COPY)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout
    return COPY


@pytest.fixture(scope="module", autouse=True)
def _clean() -> object:
    yield
    Engine().remove_tag(COPY)


@pytest.fixture(scope="module")
def few() -> Iterator[str]:
    """A small image with code for the cards of the large one."""
    make = ["docker", "buildx", "build", "--builder=default", "--load", "-q", "-t", FEW, "-"]
    subprocess.run(make, input=FEW_OF, text=True, check=True, capture_output=True)
    yield FEW
    for name in (FEW, name_of(CARD), name_of("never")):
        Engine().remove_tag(name)


def name_of(tag: str) -> str:
    return f"{FEW.partition(':')[0]}:{tag}"


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


def test_a_dry_run_says_what_would_go_and_makes_nothing(few: str) -> None:
    done = buildtool("prune", few, "--targets", CARD, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would save" in done.stdout
    assert "gfx1030" in done.stdout
    assert Engine().inspect(name_of(CARD)) is None
    done = buildtool("prune", few, "--targets", "gfx1201", "--dry-run")
    assert done.returncode == 2
    assert f"{few}: there is no code for gfx1201" in done.stderr


def test_pruning_to_what_is_there_already_makes_nothing(few: str) -> None:
    done = buildtool("prune", few, "--targets", CARD)
    assert done.returncode == 0, done.stderr
    assert "2 libraries cut" in done.stdout
    done = buildtool("prune", name_of(CARD), "--targets", CARD, "--tag", name_of("never"))
    assert done.returncode == 0
    assert "nothing to cut" in done.stdout
    assert Engine().inspect(name_of("never")) is None


def test_a_card_that_the_image_has_no_code_for_is_refused_with_what_there_is(few: str) -> None:
    done = buildtool("prune", few, "--targets", "gfx1201")
    assert done.returncode == 2
    assert "no code for gfx1201" in done.stderr
    assert CARD in done.stderr
    assert "Traceback" not in done.stderr


def test_a_build_for_a_card_that_the_stack_lacks_is_refused_with_what_it_has() -> None:
    done = buildtool("build", "rocm", "--targets", "gfx1201", "--no-audit")
    assert done.returncode == 2
    assert "no code for gfx1201" in done.stderr
    assert "gfx803" in done.stderr


def test_an_unknown_image_is_named() -> None:
    done = buildtool("prune", "weir/no-such-image", "--targets", CARD)
    assert done.returncode == 5
    assert "weir/no-such-image" in done.stderr

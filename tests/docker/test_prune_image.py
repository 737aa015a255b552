"""Images for one card: by a build that asks for it, and by pruning an image that the engine holds.

The whole ROCm image is pruned in test_whole_images.py.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildtool.engine.client import Engine

ROOT = Path(__file__).parents[2]
CARD = "gfx906"
# two of its libraries, for what doesn't depend on how large an image is
FEW = f"t-prune-image-{os.getpid()}/few:latest"
LIBRARIES = "/usr/lib/x86_64-linux-gnu/"
FEW_OF = f"""
FROM scratch
COPY --from=weir/rocm:latest {LIBRARIES}librocblas.so.0.1 {LIBRARIES}librocfft.so.0.1 {LIBRARIES}
"""


def buildtool(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".venv/bin/python"), "-m", "buildtool", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


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

"""Configs that the audit reads with a note: the engine loads each of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))
sys.path.append(str(Path(__file__).parents[1] / "unit" / "image"))

from image_maker import archive
from odd_configs import ODD, odd_archive

from buildtool.engine.client import Engine

REF = f"t-docs-{os.getpid()}/odd:1"
# the classic image store counts rows of the history, which containerd's doesn't read
CLASSIC_REFUSES = {"a history row that is null": b"too many non-empty layers"}


@pytest.fixture(autouse=True)
def clean_engine() -> Iterator[None]:
    yield
    subprocess.run(["docker", "image", "rm", "-f", REF], check=False, capture_output=True)


@pytest.mark.parametrize("case", [*ODD, "another name than its digest"])
def test_the_engine_loads_what_the_audit_reads_with_a_note(case: str) -> None:
    if case in ODD:
        members = odd_archive(ODD[case][0])
    else:
        members = odd_archive(lambda config: config, config_name="0" * 64 + ".json")
    members["manifest.json"] = members["manifest.json"].replace(b"t-docs/odd:1", REF.encode())
    done = subprocess.run(["docker", "load"], input=archive(members), check=False, capture_output=True)
    if case in CLASSIC_REFUSES and not Engine().info().containerd_store:
        assert CLASSIC_REFUSES[case] in done.stderr
        return
    assert done.returncode == 0, done.stderr.decode()

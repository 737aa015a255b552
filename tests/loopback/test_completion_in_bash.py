"""The completion script in a real bash, asked as the Tab key asks."""

import subprocess
from pathlib import Path

import pytest

from buildtool.commands import completion

ASK = """
set -eu
. ./weir.bash
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_shtab_weir "$1" "${!#}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["au"], {"audit"}),
        (["audit", "--base"], {"--baseline"}),
        (["audit", "--format", ""], {"table", "json", "markdown", "sarif", "junit"}),
        (["audit", "ima"], {"image.tar"}),
        (["audit", "--json", "ima"], {"image.tar"}),
        (["diff", "image.tar", "oth"], {"other.tar"}),
        (["probe", "comp"], {"compare"}),
        (["probe", "run", "--mod"], {"--model"}),
        (["completion", ""], {"bash", "zsh"}),
    ],
)
def test_the_tab_key_offers_what_can_follow(typed: list[str], offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "weir.bash").write_text(completion.script("bash"))
    for name in ("image.tar", "other.tar"):
        (tmp_path / name).touch()
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", "weir", *typed], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == offered

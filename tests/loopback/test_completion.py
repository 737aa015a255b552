"""The completion scripts in a real bash, fish and zsh, asked as the Tab key asks."""

import os
import pty
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from buildtool.audit.formats import STDOUT_FORMATS
from buildtool.cli import completion

sys.path.append(str(Path(__file__).parents[1] / "docker"))
from debian_packages import unpacked

TIMEOUT_S = 120
ASK_BASH = """
set -eu
. ./weir.bash
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_shtab_weir "$1" "${!#}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""
# what completes a word also notes down all candidates, then the shell ends
ZSHRC = """
module_path=(%(modules)s $module_path)
fpath=($PWD/functions %(functions)s/**/*(/N) $fpath)
autoload -Uz compinit
compinit -u -d $DUMP
bindkey '^I' complete-word
compadd () {
  if [[ ${@[1,(i)(-|--)]} != *-[a-zA-Z]#[OAD]* ]]; then
    local -a found
    builtin compadd -O found "$@"
    print -rl -- $found >> offered
  fi
  builtin compadd "$@"
}
comppostfuncs=(exit)
"""


@dataclass(frozen=True)
class Zsh:
    """The program, what it reads at its start, and where it keeps the list of all completions."""

    program: Path
    settings: str
    dump: Path


@pytest.fixture(scope="session")
def zsh(tmp_path_factory: pytest.TempPathFactory) -> Zsh:
    """This machine's, else that of Debian's packages."""
    folder = tmp_path_factory.mktemp("zsh")
    if found := shutil.which("zsh"):
        return Zsh(Path(found), ZSHRC % {"modules": "", "functions": "/none"}, folder / "dump")
    root = unpacked(folder, "zsh", "zsh-common")
    modules = next(root.glob("usr/lib/*/zsh/*/zsh/zle.so")).parents[1]
    settings = ZSHRC % {"modules": modules, "functions": root / "usr/share/zsh/functions"}
    return Zsh(root / "bin/zsh", settings, folder / "dump")


@pytest.fixture(scope="session")
def fish(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This machine's, else that of Debian's packages."""
    if found := shutil.which("fish"):
        return Path(found)
    return unpacked(tmp_path_factory.mktemp("fish"), "fish", "fish-common", "libpcre2-32-0") / "usr/bin/fish"


def offered_by_fish(typed: list[str], folder: Path, fish: Path) -> set[str]:
    (folder / "weir.fish").write_text(completion.script("fish"))
    line = " ".join(["weir", *typed])
    libraries = ":".join(map(str, fish.parents[1].glob("lib/*-linux-gnu")))
    functions = fish.parents[1] / "share/fish/functions"
    done = subprocess.run(
        [
            fish,
            "--no-config",
            "-c",
            f"set -p fish_function_path {functions}; source weir.fish; complete -C {line!r}",
        ],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
            "LD_LIBRARY_PATH": libraries,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return {row.partition("\t")[0] for row in done.stdout.splitlines()}


def offered_by_bash(typed: list[str], folder: Path) -> set[str]:
    (folder / "weir.bash").write_text(completion.script("bash"))
    done = subprocess.run(
        ["bash", "-c", ASK_BASH, "bash", "weir", *typed],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(filter(None, done.stdout.splitlines()))


def offered_by_zsh(typed: list[str], folder: Path, zsh: Zsh) -> set[str]:
    """From a terminal: zsh completes nowhere else."""
    (folder / "functions").mkdir()
    (folder / "functions/_weir").write_text(completion.script("zsh"))
    (folder / ".zshrc").write_text(zsh.settings)
    ours, theirs = pty.openpty()
    try:
        os.write(ours, " ".join(["weir", *typed]).encode() + b"\t")
        subprocess.run(
            [zsh.program, "-d", "-i"],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "ZDOTDIR": folder, "DUMP": zsh.dump, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return set((folder / "offered").read_text().split())


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["au"], {"audit"}),
        (["audit", "--base"], {"--baseline"}),
        (["audit", "--format", ""], set(STDOUT_FORMATS)),
        (["audit", "ima"], {"image.tar"}),
        (["audit", "--json", "ima"], {"image.tar"}),
        (["diff", "image.tar", "oth"], {"other.tar"}),
        (["probe", "comp"], {"compare"}),
        (["probe", "run", "--mod"], {"--model"}),
        (["completion", ""], {"bash", "fish", "man", "zsh"}),
    ],
)
def test_the_tab_key_offers_what_can_follow(
    shell: str, typed: list[str], offered: set[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for name in ("image.tar", "other.tar"):
        (tmp_path / name).touch()
    if shell == "bash":
        found = offered_by_bash(typed, tmp_path)
    elif shell == "fish":
        found = offered_by_fish(typed, tmp_path, request.getfixturevalue("fish"))
    else:
        found = offered_by_zsh(typed, tmp_path, request.getfixturevalue("zsh"))
    assert found == offered


def test_a_hostile_file_name_is_offered_as_it_is_and_never_run(tmp_path: Path) -> None:
    run = "touch ran"
    names = {"a b.tar", f"a$({run}).tar", f"a`{run}`.tar", f"a;{run};.tar", "a*.tar", "a'\".tar", "a[0].tar"}
    for name in names:
        (tmp_path / name).touch()
    assert offered_by_bash(["audit", "a"], tmp_path) == names
    for typed in ([f"a[$({run})]", ""], ["audit", f"a[0$({run})]", ""], ["audit", f"--format[$({run})]", ""]):
        offered_by_bash(typed, tmp_path)
    assert not (tmp_path / "ran").exists()

"""The commit in `--version` comes from a note or from git's files, and a guess never takes its place."""

from pathlib import Path

import pytest

from buildtool.cli import program as host
from probes.cli import program as inside
from probes.core import invocation
from probes.core.commit import NOTE, commit_of

ONE, OTHER = "1" * 40, "ab" * 32  # SHA-1 and SHA-256


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_branch_is_followed_to_its_own_file_and_before_that_of_the_packed_ones(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", "ref: refs/heads/a/b\n")
    write(
        tmp_path / ".git/packed-refs",
        f"# pack-refs\n{'2' * 40} refs/heads/a\n{ONE} refs/heads/a/b\n^{OTHER}\n",
    )
    assert commit_of(tmp_path) == ONE
    write(tmp_path / ".git/refs/heads/a/b", f"{OTHER}\n")
    assert commit_of(tmp_path) == OTHER


def test_a_detached_head_is_the_commit(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", f"{ONE}\n")
    assert commit_of(tmp_path) == ONE


def test_a_work_tree_finds_its_branch_in_the_main_one(tmp_path: Path) -> None:
    main, tree = tmp_path / "main/.git", tmp_path / "tree"
    write(tree / ".git", f"gitdir: {main}/worktrees/tree\n")
    write(main / "worktrees/tree/HEAD", "ref: refs/heads/x\n")
    write(main / "worktrees/tree/commondir", "../..\n")
    write(main / "refs/heads/x", ONE)
    assert commit_of(tree) == ONE


@pytest.mark.parametrize(
    "head",
    [
        "",
        "ref: refs/heads/none",
        "ref: refs/../../secret",
        "ref: /etc/hostname",
        "\udcff",
        f"{ONE}0",
        "1" * 39,
    ],
)
def test_what_is_no_commit_is_unknown(head: str, tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    write(tmp_path / "secret", ONE)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_bytes(head.encode(errors="surrogateescape"))
    (tmp_path / ".git/packed-refs").mkdir()  # can't be read
    assert commit_of(tmp_path) is None


def test_a_package_does_not_take_the_commit_of_the_checkout_that_it_is_installed_into(tmp_path: Path) -> None:
    write(tmp_path / ".git/HEAD", ONE)
    write(tmp_path / NOTE, "")
    assert commit_of(tmp_path) is None
    write(tmp_path / NOTE, OTHER)
    assert commit_of(tmp_path) == OTHER


@pytest.mark.parametrize("words", [["--version"], ["probe", "--version"]])
@pytest.mark.parametrize(("commit", "end"), [(ONE, " (commit 111111111111)\n"), (None, "\n")])
def test_the_version_names_the_commit_only_where_it_is_known(
    words: list[str],
    commit: str | None,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(invocation, "commit_of", lambda _root: commit)
    monkeypatch.setattr(invocation, "tool_version", lambda: "7.8.9")
    for module in (host, inside):
        monkeypatch.setattr(module, "_parser", module._parser.__wrapped__)  # else each is made once
    with pytest.raises(SystemExit):
        host.main(words)
    assert capsys.readouterr().out == f"gpu-weir 7.8.9{end}"

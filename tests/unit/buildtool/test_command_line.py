"""What both programs do with output that can't be written, and with paths that can't be looked at."""

import ast
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sources import nodes

from buildtool.cli import program
from buildtool.core.errors import DataError, Exit
from buildtool.core.files import PathKind, kind_of_path
from probes import __main__ as probes_main
from probes.core import output

Entry = Callable[[], None]
LONG = "a" * 300
PACKAGE = Path(program.__file__).parent
PROGRAMS: list[tuple[Entry, list[str]]] = [
    (program.entry, ["weir", "prune", "--help"]),
    (probes_main.entry, ["probes", "list"]),
]
programs = pytest.mark.parametrize(("entry", "words"), PROGRAMS, ids=["buildtool", "probes"])


@contextmanager
def descriptors(monkeypatch: pytest.MonkeyPatch, *, out: int | None, err: int | None) -> Iterator[None]:
    """Standard output and error as a shell would hand them to a program; None is closed."""
    kept = {number: os.dup(number) for number in (1, 2)}
    with monkeypatch.context() as patch:
        for number, name, given in ((1, "stdout", out), (2, "stderr", err)):
            os.close(number)
            if given is not None:
                os.dup2(given, number)
            stream = None if given is None else os.fdopen(number, "w", closefd=False)
            patch.setattr(sys, name, stream)
        patch.setattr(signal, "signal", lambda *_: None)
        try:
            yield
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


@pytest.fixture
def exit_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[object, str]]:
    """Runs a program with the given standard output; gives the exit code and what standard error got."""

    def run(
        entry: Entry, words: list[str], out: int | None, *, lost_errors: bool = False
    ) -> tuple[object, str]:
        told = tmp_path / "stderr"
        monkeypatch.setattr(sys, "argv", words)
        err = os.open("/dev/full" if lost_errors else told, os.O_WRONLY | os.O_CREAT)
        with descriptors(monkeypatch, out=out, err=err), pytest.raises(SystemExit) as left:
            entry()
        os.close(err)
        return left.value.code, told.read_text() if told.exists() else ""

    return run


ELSEWHERE = "\n  free space there, or write elsewhere: > FILE\n"


@programs
def test_full_standard_output_is_an_error_and_no_traceback(
    exit_of: Callable[..., tuple[object, str]], entry: Entry, words: list[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    code, told = exit_of(entry, words, full)
    assert (code, told) == (5, f"error: can't write standard output: No space left on device{ELSEWHERE}")
    assert exit_of(entry, words, full, lost_errors=True)[0] == 5, "standard error is full as well"
    os.close(full)


@programs
def test_closed_standard_output_is_an_error_and_no_traceback(
    exit_of: Callable[..., tuple[object, str]], entry: Entry, words: list[str]
) -> None:
    code, told = exit_of(entry, words, None)
    assert (code, told) == (5, f"error: can't write standard output: Bad file descriptor{ELSEWHERE}")


@programs
def test_a_reader_that_left_changes_neither_exit_code_nor_standard_error(
    exit_of: Callable[..., tuple[object, str]], entry: Entry, words: list[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert exit_of(entry, words, writing) == (0, "")
    os.close(writing)


def test_a_file_opened_later_never_becomes_the_closed_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with descriptors(monkeypatch, out=None, err=None):
        output.harden()
        descriptor = os.open(tmp_path / "report", os.O_WRONLY | os.O_CREAT)
        os.close(descriptor)
    assert descriptor > 2


def test_a_path_outside_the_streams_encoding_is_written_as_an_escape(
    exit_of: Callable[..., tuple[object, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoded(name: str) -> bytes:
        page = tmp_path / "out"
        descriptor = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with descriptors(monkeypatch, out=descriptor, err=descriptor):
            sys.stdout.reconfigure(encoding=name)  # type: ignore[union-attr] - what PYTHONIOENCODING does
            output.harden()
            print("b\u00e4h \udcff")
            sys.stdout.flush()
        os.close(descriptor)
        return page.read_bytes()

    assert encoded("ascii") == b"b\\xe4h \\udcff\n"
    assert encoded("utf-8") == "bäh \\udcff\n".encode()


def test_targets_do_not_swallow_the_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent.tar")
    for words in (
        ["--targets", "gfx906", absent],
        [absent, "--targets", "gfx906,gfx1100", "--targets", "gfx908"],
    ):
        assert program.main(["audit", *words]) == Exit.DATA
        assert f"can't read {absent}" in capsys.readouterr().err


def test_compress_does_not_swallow_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        program.main(["prune", "--targets", "gfx906", "--compress", str(tmp_path / "absent.so")]) == Exit.DATA
    )
    assert "there is no file or directory" in (told := capsys.readouterr().err)
    assert "check the path" in told


@pytest.mark.parametrize(
    "words", [["audit", f"./{LONG}"], ["diff", f"./{LONG}", "b"], ["audit", f"{LONG}.tar"]]
)
def test_a_name_of_300_characters_is_an_error_and_no_traceback(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(words) == Exit.DATA
    assert "File name too long" in capsys.readouterr().err
    assert kind_of_path(Path(LONG)) is PathKind.NOTHING


@pytest.fixture
def unsearchable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory whose entries can't be looked at: what any user but root meets."""
    real = os.stat

    def refuse(path: object, *rest: object, **more: object) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/locked/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", refuse)
    return tmp_path / "locked"


@pytest.mark.parametrize("verb", ["audit", "diff", "prune"])
def test_a_path_below_a_directory_that_cannot_be_searched_is_no_traceback(
    verb: str, unsearchable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"audit": [], "diff": ["other"], "prune": ["--targets", "gfx906"]}[verb]
    assert program.main([verb, str(unsearchable / "image.tar"), *more]) == Exit.DATA
    assert "Permission denied" in capsys.readouterr().err
    with pytest.raises(DataError, match="Permission denied"):
        kind_of_path(unsearchable / "x")


def test_a_deeply_nested_manifest_of_a_prune_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "weir-prune.json"
    manifest.write_text("[" * 100_000 + "]" * 100_000)
    assert program.main(["audit", str(manifest)]) == Exit.DATA
    assert program.main(["prune", str(tmp_path), "--targets", "gfx906"]) == Exit.DATA
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["audit", "x.tar", "--image", ""], "argument --image: its value is empty; write `--image REF`"),
        (["audit", "x.tar", "--image="], "argument --image: its value is empty; write `--image REF`"),
        (["audit", "x.tar", "--json", ""], "write `--json FILE`, or leave --json out"),
        (["audit", "x.tar", "--memory", ""], "write `--memory SIZE`"),
        (["audit", ""], "its value is empty; write IMAGE|ARCHIVE|LAYOUT-DIR|REPORT.json"),
        (["prune", "x", "--targets", ""], "write `--targets GFX[,GFX...]`"),
        (["prune", "x", "--targets", "gfx906", "--tag", ""], "write `--tag REF`"),
        (["prune", "x", "--targets", "gfx906", "--out", ""], "write `--out PATH`"),
        (["build", "cpu", "--targets", ""], "write `--targets GFX[,GFX...]`"),
        (["build", "cpu", ""], "its value is empty; write VARIANT"),
        (["plan", "--catalog", ""], "write `--catalog FILE`"),
    ],
)
def test_an_empty_value_does_not_pass_for_one_that_was_not_given(
    words: list[str], way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `--image "$IMAGE"` with an unset variable: another image than the one that was meant."""
    with pytest.raises(SystemExit) as left:
        program.main(words)
    assert left.value.code == Exit.USAGE
    assert way_out in capsys.readouterr().err


def test_an_empty_value_is_refused_by_the_probes_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        probes_main.main(["run", "--out", ""])
    assert left.value.code == Exit.USAGE
    assert "write `--out DIR`, or leave --out out" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["audit", "x.tar"], ["build", "cpu"], ["prune", "x"]])
def test_a_list_of_targets_that_names_none_does_not_pass_for_no_list(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main([*verb, "--targets", ","]) == Exit.USAGE
    assert "--targets" in capsys.readouterr().err


def test_no_hint_needs_a_makefile_that_an_installed_package_lacks() -> None:
    """`weir engine` can be typed anywhere; only the first screen of help compares a verb with `make`."""
    found = [
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in nodes(path, ast.Constant, where=r"\bmake\b")
        if isinstance(node.value, str)
        for text in re.findall(r"\bmake (?:engine|images|probe)\b", node.value)
        if "what `make images` does" not in node.value
    ]
    assert not found


def test_a_directory_for_caches_that_cannot_be_made_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", lambda *_, **__: None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEIR_STATE", str(tmp_path / "file"))
    assert program.main(["build", "cpu"]) == Exit.DATA
    assert "WEIR_STATE=DIR" in capsys.readouterr().err


def test_a_current_directory_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(_catalog: Path) -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("buildtool.build.workplace.lock_file", gone)
    assert program.main(["plan", "cpu"]) == Exit.DATA
    assert "can't use the current directory: No such file" in capsys.readouterr().err


def test_what_cannot_be_written_in_the_end_is_refused_before_minutes_of_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A read-only checkout: the lock and the reports are written after the downloads and the build."""
    monkeypatch.setattr("buildtool.engine.provision.ensure_engine", lambda *_, **__: None)
    monkeypatch.setattr("buildtool.engine.buildx.require_buildx", lambda: None)
    monkeypatch.setenv("WEIR_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("WEIR_LOCK", "/proc/none/lock.json")
    for words, way_out in (
        (["--reports", "/proc/reports"], "--reports DIR"),
        (["--reports", str(tmp_path)], "WEIR_LOCK=FILE"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda place, _mode: not str(place).startswith("/proc"))
            assert program.main(["build", "cpu", *words]) == Exit.DATA
        assert "can't write into /proc\n  " in (told := capsys.readouterr().err)
        assert way_out in told


def test_no_verb_is_a_mistake_that_says_what_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["weir"])
    assert program.main([]) == Exit.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    for line in (
        "Why is my PyTorch image so large?",
        "    weir audit IMAGE",
        "    weir doctor [--card NAME]",
    ):
        assert line in said.err.splitlines()
    assert all(len(line) < 80 for line in said.err.splitlines())

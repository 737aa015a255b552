"""Nothing that others wrote acts on a terminal: names in images and trees, words of drivers, engines, apt."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpucode.maker import code
from hostile_texts import CHOSEN

from buildtool.audit.text import SummaryRow
from buildtool.build import pipeline
from buildtool.cli.program import main
from buildtool.core.errors import BuildFailed, Exit
from buildtool.core.progress import ProgressLog
from probes.cli.program import main as probes_main
from probes.core import output

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj\r"


def harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def test_the_three_ways_to_speak_quote_every_hostile_text(capsys: pytest.CaptureFixture[str]) -> None:
    for text in CHOSEN:
        breaks = {output.echo: text.count("\n") + 1, output.error: text.count("\n") + 1, output.progress: 1}
        for speak in (output.echo, output.error, output.progress, output.redraw):
            speak(text)
            told = capsys.readouterr()
            said = (told.out + told.err).removeprefix("\r\x1b[K")
            assert harmless(said), text
            assert said.count("\n") == breaks.get(speak, 0), text


@pytest.mark.parametrize(
    "command", ["::error file=x,line=1::hi", "  \t::add-mask::a", "##[error]hi", "x ##vso[task.setvariable]a",
    "##teamcity[buildStop]"],
)  # fmt: skip
def test_no_line_is_a_command_to_the_ci_that_shows_the_output(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = io.StringIO()
    ProgressLog(stream=shown).line(command)
    output.echo(f"first\n{command}\n\n{command}")
    output.error(command)
    output.progress(command)
    told = capsys.readouterr()
    for line in (told.out + told.err + shown.getvalue()).splitlines():
        assert not line.lstrip().startswith("::")
        assert not re.search(r"##(vso|teamcity)?\[", line)
    assert "::" not in command or "\\x3a:" in told.out


def test_a_linted_file_is_named_without_beginning_a_command_to_a_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "::error file=Dockerfile"
    Path(name).write_text("FROM ubuntu\nRUN echo '##vso[task.complete]' && sudo pip install torch\n")
    assert main(["doctor", "--lint", name]) == Exit.FINDINGS
    said = capsys.readouterr().out
    assert said.startswith("\\x3a:error file=Dockerfile:1: ")
    assert not [line for line in said.splitlines() if line.lstrip().startswith("::") or "##vso[" in line]


def test_lines_of_an_engine_or_of_apt_are_relayed_without_their_escape_sequences() -> None:
    out = io.StringIO()
    ProgressLog(stream=out).line(f"#5 0.2 {EVIL}\nforged")
    assert harmless(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert "\\x1b]0;owned\\x07" in out.getvalue()


def test_an_error_that_holds_what_a_container_said_is_shown_harmless(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: object) -> int:
        raise BuildFailed(f"it said:\n{EVIL}", f"look: {EVIL}")

    monkeypatch.setattr("buildtool.cli.doctor.run", fail)
    assert main(["doctor"]) == Exit.BUILD
    told = capsys.readouterr().err
    assert harmless(told)
    assert told.startswith("error: it said:\n\\x1b]0;owned")


@pytest.mark.parametrize("name", [EVIL, "a\nforged: 0 B", "caf\udce9"])
def test_names_in_a_pruned_tree_are_shown_harmless(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / name
    folder = tree / f"rocblas/{name}/library"
    folder.mkdir(parents=True)
    for card in ("gfx906", "gfx1100"):
        (folder / f"TensileLibrary_{card}.co").write_bytes(code(card, n_bytes=3000))
    assert main(["prune", str(tree), "--targets", "gfx906", "--dry-run"]) == Exit.OK
    told = capsys.readouterr()
    assert harmless(told.out + told.err)
    assert "would delete" in told.err
    assert not [line for line in (told.out + told.err).splitlines() if line.startswith("forged")]


@pytest.mark.parametrize("program", [main, probes_main], ids=["weir", "weir-probes"])
def test_a_wrong_argument_is_named_without_its_escape_sequences(
    program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["show" if program is probes_main else "doctor", "r.json", f"--{EVIL}"])
    assert ended.value.code == Exit.USAGE
    told = capsys.readouterr().err
    assert "owned" in told
    assert harmless(told)


def test_tables_of_a_build_hold_no_control_characters() -> None:
    assert harmless(pipeline.audited_text([SummaryRow(*[EVIL] * 7)]))


@pytest.mark.parametrize(("columns", "shown"), [(10, "reading a"), (0, "reading a long name"), (1, "")])
def test_a_line_that_is_redrawn_fits_the_terminal(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a longer one only the last row can be cleared, so that every redraw would scroll."""
    controller, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setattr(output, "_ERR", side)
    output.redraw("reading a long name")
    assert capsys.readouterr().err == f"\r\x1b[K{shown}"
    os.close(controller)
    os.close(side)


def test_nothing_is_redrawn_on_a_terminal_that_only_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm")
    assert output.can_redraw()
    monkeypatch.setenv("TERM", "dumb")
    assert not output.can_redraw()

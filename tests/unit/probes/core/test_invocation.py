"""Hints name the command that the reader has: `weir` on a host, `python3 -m probes` in an image."""

import sys
from pathlib import Path

import pytest

from buildtool.cli.program import main as weir
from buildtool.core.errors import Exit
from probes.cli import program as probes
from probes.core.invocation import host_command, probe_command, probe_line


@pytest.mark.parametrize(
    ("started", "host", "probe"),
    [
        ("/usr/local/bin/weir", "weir", "weir probe"),
        ("C:\\weir.exe" if sys.platform == "win32" else "weir.exe", "weir", "weir probe"),
        ("/opt/weir/app/probes/__main__.py", "python3 -m buildtool", "python3 -m probes"),
        ("", "python3 -m buildtool", "python3 -m probes"),
    ],
)
def test_a_hint_names_the_program_as_it_was_started(
    started: str, host: str, probe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    assert (host_command(), probe_command()) == (host, probe)


def test_a_line_to_paste_is_read_by_a_shell_as_it_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["weir"])
    assert probe_line("show", Path("-a b/$(x).json")) == "weir probe show './-a b/$(x).json'"
    assert probe_line("show", Path("a\x1b[2J")).startswith("# no command to paste")


def test_help_of_weir_probe_is_that_of_the_probes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weir"])
    for words in (["probe", "--help"], ["probe", "run", "--help"]):
        with pytest.raises(SystemExit):
            weir(words)
    told = capsys.readouterr().out
    assert told.startswith("usage: weir probe ")
    assert "--numa" in told


@pytest.mark.parametrize("program", [weir, probes.main])
def test_version_names_the_package(
    program: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["--version"])  # type: ignore[operator]
    assert (ended.value.code, capsys.readouterr().out.split()[0]) == (Exit.OK, "gpu-weir")

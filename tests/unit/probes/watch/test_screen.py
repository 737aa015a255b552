"""What is drawn: a table where rich is and a terminal takes it, plain lines elsewhere; names stay text."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from rich.live import Live
from watch_samples import NONE, SUBJECT, sample

from probes.watch.screen import LiveTable, PlainLines, view_for

FULL = sample(0.0, power_w=100.0, vram_bytes=2.0**30, slow=("power cap",))


def terminal(monkeypatch: pytest.MonkeyPatch, *, is_one: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_one)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_terminal_with_rich_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch, is_one=True)
    view = view_for(SUBJECT, plain=False)
    assert isinstance(view, LiveTable)
    view.close()


@pytest.mark.parametrize("why", ["no terminal", "NO_COLOR", "dumb", "--plain", "no rich"])
def test_everything_else_has_lines(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch, is_one=why != "no terminal")
    if why == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if why == "no rich":
        monkeypatch.setitem(sys.modules, "rich.live", None)
    assert isinstance(view_for(SUBJECT, plain=why == "--plain"), PlainLines)


def test_the_table_has_what_is_known_and_no_control_characters() -> None:
    view = LiveTable(SUBJECT)
    view.close()
    told = io.StringIO()
    Console(file=told, width=120, color_system=None).print(view._table(FULL))
    text = told.getvalue()
    assert "\x1b" not in text
    for words in ("100 W", "1.00 GiB", "power cap", "Radeon \\x1b[31m<b>"):
        assert words in text
    assert "fan" not in text


def test_a_picture_is_drawn_at_most_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []
    monkeypatch.setattr(Live, "update", lambda _self, table, refresh: drawn.append(table))
    view = LiveTable(SUBJECT)
    for step in range(9):
        view.show(replace(FULL, at_s=step / 4))
    view.close()
    assert len(drawn) == 3


def test_lines_name_the_cards_first_and_come_every_second() -> None:
    said: list[str] = []
    view = PlainLines(SUBJECT, said.append)
    for step in range(9):
        view.show(replace(FULL, at_s=step / 4, late_s=None))
    assert len(said) == 2 + 3
    assert "slowed: power cap" in said[-1]


def test_a_machine_without_cards_says_so() -> None:
    said: list[str] = []
    PlainLines(replace(SUBJECT, cards=()), said.append)
    assert "the host alone is watched" in said[1]
    assert NONE.reason not in said[1]

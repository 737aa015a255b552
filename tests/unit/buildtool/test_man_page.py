"""The manual page weir(1) has every verb and option, and no text of ours is taken for a request of roff's."""

import argparse
import re

import pytest

from buildtool.cli import completion
from buildtool.cli import program as cli
from buildtool.cli.program import main
from buildtool.core.errors import Exit
from buildtool.core.man_page import man_page

REQUESTS = {".TH", ".SH", ".SS", ".PP", ".TP"}


def test_no_verb_or_option_is_missing_from_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "man"]) == Exit.OK
    page = capsys.readouterr().out.replace(r"\-", "-")
    for verb in (*cli.VERBS, "probe run", "probe throughput"):
        assert f"\n.SS weir {verb}\n" in page
    actions = list(completion._actions(cli.build_parser(cli.VERBS, "weir")))
    options = {name for action in actions for name in action.option_strings}
    assert options <= set(re.findall(r"--?[\w-]+", page))


def test_every_line_that_begins_like_a_request_is_one_of_ours() -> None:
    page = completion.manual()
    assert {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))} <= REQUESTS
    assert "%(default)s" not in page


def test_a_help_text_with_signs_of_roff_is_printed_as_it_is() -> None:
    parser = argparse.ArgumentParser("p", description=r".so /etc/passwd \n[x] -y", add_help=False)
    parser.add_argument(
        "--out", metavar="FILE", default="a\\b", help="'quoted', then\n.PP (default: %(default)s)"
    )
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    page = man_page(parser, 'a "title"', "1")
    assert r"\&.so /etc/passwd \en[x] \-y" in page
    assert "\\&'quoted', then .PP (default: a\\eb)\n" in page
    assert "secret" not in page.split(".TP", 1)[1]


def test_a_page_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    page = completion.manual()
    monkeypatch.setenv("COLUMNS", "23")
    assert completion.manual() == page

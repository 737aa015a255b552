"""The table of report formats: `weir audit` offers what is in it."""

import argparse

import pytest
from report_maker import small_report

from buildtool.audit.formats import FORMATS, render
from buildtool.cli.audit import add_arguments


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_renders_a_report_and_is_offered_where_its_row_says(
    name: str, parser: argparse.ArgumentParser
) -> None:
    assert render(small_report(), name)
    row = FORMATS[name]
    for words, offered in (([f"--{name}", "FILE"], row.to_file), (["--format", name], row.to_stdout)):
        if offered:
            parser.parse_args(["image", *words])
        else:
            with pytest.raises(SystemExit):
                parser.parse_args(["image", *words])


def test_no_two_formats_are_the_same() -> None:
    assert len({render(small_report(), name) for name in FORMATS}) == len(FORMATS)

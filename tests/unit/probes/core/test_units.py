"""Quantities as people read them."""

import pytest

from probes.core.units import counted, parse_bytes, typed_bytes


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (1, "file", "1 file"),
        (0, "file", "0 files"),
        (2000, "layer", "2,000 layers"),
        (1, "library", "1 library"),
        (3, "library", "3 libraries"),
    ],
)
def test_a_noun_agrees_with_its_number(number: int, noun: str, shown: str) -> None:
    assert counted(number, noun) == shown


@pytest.mark.parametrize("text", ["4GiB", "11654MiB", "1000B", "0B"])
def test_bytes_in_a_command_are_written_as_an_option_reads_them(text: str) -> None:
    assert typed_bytes(parse_bytes(text)) == text

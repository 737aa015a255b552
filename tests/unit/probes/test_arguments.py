"""What the verbs' arguments have in common."""

import argparse

import pytest

from probes.cli import program
from probes.cli.arguments import size
from probes.core.errors import Exit
from probes.core.output import whole


@pytest.mark.parametrize("text", ["0", "1000001", "0000001000999999", "-1", "1.5", "\u0663", ""])
def test_a_number_beyond_its_bounds_does_not_pass_by_its_first_digits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 1000000"):
        whole(1, 10**6)(text)


def test_bounds_themselves_are_taken() -> None:
    assert (whole(0, 5)("0"), whole(1, 10**6)("1000000")) == (0, 10**6)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("4", "4GiB"),
        ("4.5", "4.5GiB"),
        ("0.9", "0.9GiB"),
        (" 80 ", "80GiB"),
        ("4096", "4096MiB"),
        ("1048575", "1048575MiB"),
        ("5000000.5", "5000000.5MiB"),
    ],
)
def test_a_number_without_a_unit_is_no_size_of_a_few_bytes(text: str, instead: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"without a unit is bytes; write {instead}$"):
        size(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("1048576", 1 << 20), ("4.5GiB", 9 << 29), ("4096B", 4096), ("0.5MiB", 1 << 19)],
)
def test_sizes_with_a_unit_and_large_numbers_of_bytes_are_read(text: str, n_bytes: int) -> None:
    assert size(text) == n_bytes


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "bert-base", "--vram"),
        ("plan", "bert-base", "--vram", "1GiB", "--host"),
        ("fit", "bert-base", "--budget"),
        ("place", "qwen2.5-0.5b", "--vram"),
        ("place", "here", "--vram", "1GiB", "--host"),
        ("run", "--vram"),
    ],
)
def test_every_verb_reads_sizes_by_one_rule(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        program.main([*words, "4.5"])
    assert refused.value.code == Exit.USAGE
    assert "write 4.5GiB" in capsys.readouterr().err


def test_each_verb_is_in_the_module_that_is_imported_for_it() -> None:
    for module in dict.fromkeys(program.MODULES.values()):
        parser = argparse.ArgumentParser()
        program.add_arguments(parser, module)
        (verbs,) = (action.choices for action in parser._actions if action.dest == "verb")
        assert list(verbs or ()) == [verb for verb, name in program.MODULES.items() if name == module]

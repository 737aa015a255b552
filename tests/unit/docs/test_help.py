"""What `--help` says of every verb and argument: a whole phrase, with the default where there is one."""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from probes.cli.arguments import PROFILES
from probes.placement.planner import machine

sys.path.append(str(Path(__file__).parents[3] / "docs" / "tools"))

from parsers import parser_of, programs, verbs

CLIPPED = re.compile(r"(of|for|between|without|with|beside|\(|default\b|one for|the same)(?!\w)")
CONDITION = re.compile(r"^(for an? \w+|with --\w+): ")


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    mains = programs()
    found = {f"weir {verb}": parser for verb, parser in verbs(mains["weir"]) if verb != "probe"}
    return found | {f"probes {verb}": parser for verb, parser in verbs(mains["python3 -m probes"])}


def arguments() -> Iterator[tuple[str, argparse.Action, str]]:
    for verb, parser in parsers().items():
        for action in parser._actions:
            if action.dest != "help" and action.help != argparse.SUPPRESS:
                name = action.option_strings[0] if action.option_strings else action.dest
                yield f"{verb} {name}", action, action.help or ""


def test_every_verb_says_what_it_does_above_its_arguments() -> None:
    about = {verb: parser.description or "" for verb, parser in parsers().items()}
    assert {verb: text for verb, text in about.items() if not re.fullmatch("[A-Z].*[.]", text)} == {}


def test_no_help_of_an_argument_is_missing_or_clipped() -> None:
    shown = {name: text for name, _, text in arguments()}
    assert {
        n: text
        for n, text in shown.items()
        if not text or "None" in text or CLIPPED.match(CONDITION.sub("", text))
    } == {}


def test_the_help_of_an_option_with_a_default_says_so() -> None:
    with_default = {name: text for name, action, text in arguments() if action.default and "--" in name}
    assert {name: text for name, text in with_default.items() if "default: " not in text} == {}


def test_the_profiles_that_help_names_are_those_that_there_are() -> None:
    assert ", ".join(machine.profile_names()) == PROFILES


READ_AS = {"FILE": "Path", "DIR": "Path", "PATH": "Path", "FILE.html": "Path", "REPORT.json": "Path"}
READ_AS |= {"FILE.svg": "picture", "HOST:PORT": "_address", "NxM": "_shape", "NAME:D1,D2": "_served_shape"}
CHECKED = {"N", "S", "MS", "SECONDS", "RANK", "VERSION"}  # numbers


def test_what_stands_for_a_value_says_how_it_is_read() -> None:
    read = {name: (action.metavar, getattr(action.type, "__name__", "")) for name, action, _ in arguments()}
    assert {name for name, (metavar, how) in read.items() if READ_AS.get(metavar, how) != how} == set()
    assert {
        name for name, (metavar, how) in read.items() if metavar in CHECKED and how in ("", "str")
    } == set()


def test_what_stands_without_an_option_has_a_name_in_capitals() -> None:
    bare = {
        name: action.metavar
        for name, action, _ in arguments()
        if not action.option_strings and not action.choices
    }
    assert bare
    assert {name: shown for name, shown in bare.items() if not shown or str(shown).islower()} == {}


def test_each_program_names_its_verbs_and_wants_one() -> None:
    for main in programs().values():
        parser = parser_of(main, ["--help"])
        [chosen] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        assert (chosen.metavar, chosen.dest, chosen.required) == ("VERB", "verb", True)


def test_options_that_stand_together_do_so_under_a_title() -> None:
    for verb, parser in parsers().items():
        for group in parser._action_groups:
            assert group.title, verb

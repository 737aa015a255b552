"""Broken files: each fault is named with its line, and nothing else is."""

import pytest
from lint_files import Marked, broken

from buildtool.doctor.lint.linter import lint
from buildtool.doctor.lint.rules import rules

BROKEN = broken()


@pytest.mark.parametrize("file", BROKEN, ids=lambda file: file.name)
def test_a_broken_file_has_its_faults_named_by_line(file: Marked) -> None:
    assert file.faults
    found = [(fault.line, fault.rule) for fault in lint(file.name, file.text.encode())]
    assert sorted(found) == list(file.faults), file.source


def test_there_are_at_least_sixty_broken_files_and_forty_rules() -> None:
    assert len(BROKEN) >= 60
    assert len(rules()) >= 40


def test_every_rule_has_a_broken_file() -> None:
    seen = {rule for file in BROKEN for _, rule in file.faults}
    assert set(rules()) - seen == {"too-large"}
    assert seen <= set(rules())

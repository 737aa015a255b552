"""The table of kinds, which the verbs go through."""

from probes.cli.reports import WITH_SCHEMA
from probes.reports.kinds import KINDS, SCHEMAS


def test_the_verb_schema_offers_what_there_is() -> None:
    assert set(WITH_SCHEMA) == set(SCHEMAS)


def test_each_kind_has_a_name_and_words_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len({kind.called for kind in KINDS}) == len(KINDS)

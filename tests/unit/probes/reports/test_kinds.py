"""The table of kinds, which the verbs go through."""

from pathlib import Path

import pytest

from probes.cli.reports import WITH_SCHEMA
from probes.reports.html import prose, render_page
from probes.reports.kinds import KINDS, SCHEMAS, load_report

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def test_the_verb_schema_offers_what_there_is() -> None:
    assert set(WITH_SCHEMA) == set(SCHEMAS)


def test_each_kind_has_a_name_and_words_of_its_own() -> None:
    assert len({kind.name for kind in KINDS}) == len({kind.called for kind in KINDS}) == len(KINDS)


SAVED = {
    "report": "h200-quick.json",
    "throughput": "scan-h200.json",
    "watch": "watch-service-h100.json",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAVED)
def test_a_file_is_loaded_as_its_kind_whose_document_every_form_is_made_of(name: str) -> None:
    loaded = load_report(RESULTS / SAVED[name])
    assert loaded.kind.name == name
    document = loaded.kind.document(loaded.report)
    text = loaded.kind.text(loaded.report)
    page = render_page(document, (), raw=loaded.raw, name=SAVED[name])
    assert document.headline
    for sentence in document.headline:
        assert sentence in text
        assert prose(sentence) in page

"""README's and the docs' figures are those of the last results, and each has a place that it comes from."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))

import figures  # noqa: E402
from board import Board  # noqa: E402
from figures import FIGURES, FigureError, Results, render  # noqa: E402


def results(*rows: dict[str, Any]) -> Results:
    return Results("bench-build.json", {"cores": 2, "rows": rows})


@pytest.fixture
def ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, "ratio", figures.value("build", "build-ratio", "{:.2f}"))


@pytest.mark.parametrize("path", figures.documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_document_shows_another_figure_than_the_last_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert render(text, figures.load)[0] == text, "the results have changed: run make readme-figures"


def test_no_mark_is_left_open() -> None:
    for path in figures.documents():
        text = path.read_text(encoding="utf-8")
        assert text.count("<!--f ") == text.count("<!--/f-->") == len(figures.MARK.findall(text)), path


def test_no_figure_is_defined_and_never_shown() -> None:
    shown = {mark["name"] for path in figures.documents() for mark in figures.MARK.finditer(path.read_text())}
    assert set(FIGURES) == shown


@pytest.mark.usefixtures("ratio")
def test_a_figure_is_renewed_between_its_marks() -> None:
    text = "takes <!--f ratio-->0.99<!--/f--> of it"
    renewed, missing = render(text, lambda _file: results({"bar": "build-ratio", "value": 0.2549}))
    assert renewed == "takes <!--f ratio-->0.25<!--/f--> of it"
    assert not missing


@pytest.mark.usefixtures("ratio")
def test_without_its_results_a_figure_stays_and_they_are_named() -> None:
    text = "takes <!--f ratio-->0.99<!--/f--> of it"
    assert render(text, lambda _file: None) == (text, {"bench-build.json"})


@pytest.mark.usefixtures("ratio")
@pytest.mark.parametrize("row", [{"bar": "other", "value": 1}, {"bar": "build-ratio", "value": None}])
def test_a_result_that_is_not_there_is_an_error_not_an_old_figure(row: dict[str, Any]) -> None:
    with pytest.raises(FigureError, match="build-ratio"):
        render("<!--f ratio-->0.99<!--/f-->", lambda _file: results(row))


def test_a_mistyped_name_is_an_error() -> None:
    with pytest.raises(FigureError, match=r"ration"):
        render("<!--f ration-->0.99<!--/f-->", lambda _file: None)


def test_a_bench_keeps_what_it_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = Board("x", results=tmp_path)
    board.bar("ratio", 0.5, 0.4, "1")
    board.bar("rate", 5, 4, "1/s", at_least=True)
    board.waive("launch", "no GPU")
    assert board.finish() == 1
    kept = json.loads((tmp_path / "bench-x.json").read_text())
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert kept["rows"] == printed
    assert kept["command"] == "make bench-x"
    assert [row.get("ok") for row in printed] == [False, True, None]


def test_a_part_of_a_bench_leaves_the_last_results_alone(tmp_path: Path) -> None:
    board = Board("x", whole=False, results=tmp_path)
    board.bar("ratio", 0.3, 0.4, "1")
    assert board.finish() == 0
    assert not list(tmp_path.iterdir())

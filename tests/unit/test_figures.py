"""README's and the docs' figures are those of the last results, and each has a place that it comes from."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))

import board  # noqa: E402
import figures  # noqa: E402
from board import Board  # noqa: E402
from figures import FIGURES, FigureError, Results, render  # noqa: E402


def results(*rows: dict[str, Any]) -> Results:
    return Results("bench-build.json", {"bench": "build", "cores": 2, "rows": rows})


@pytest.fixture
def ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIGURES, "ratio", figures.value("build", "build-ratio", "{:.2f}"))


def test_no_document_shows_another_figure_than_the_last_results() -> None:
    """The results have changed: run make readme-figures."""
    texts = {path: path.read_text(encoding="utf-8") for path in figures.documents()}
    assert [path for path, text in texts.items() if render(text, figures.load)[0] != text] == []


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


def test_a_bench_run_by_a_user_changes_no_file_that_git_knows() -> None:
    assert Board("build").results == ROOT / "reports" / "bench" / "build"
    assert "reports/*" in (ROOT / ".gitignore").read_text().splitlines()
    for path in (ROOT / "tests" / "bench").glob("*.py"):
        if path.name not in ("board.py", "figures.py"):
            assert "RESULTS" not in path.read_text(encoding="utf-8"), path


def test_results_come_into_the_docs_by_a_step_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert figures.keep("x") == 1
    assert "no results in reports/bench/x: run make bench-x" in capsys.readouterr().err
    Board("x").finish()
    (tmp_path / "runs" / "x" / "scan-cpu.html").write_text("a page")
    assert not list(tmp_path.glob("*.*"))
    assert figures.keep("x") == 0
    assert {path.name for path in tmp_path.glob("*.*")} == {"bench-x.json", "scan-cpu.html"}


def test_results_older_than_their_code_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "digest_now", board.code_digest)
    code = tmp_path / "probes" / "watch" / "a.py"
    code.parent.mkdir(parents=True)
    code.write_text("A = 1")
    Board("watch", results=tmp_path).finish()
    kept = Results("bench-watch.json", json.loads((tmp_path / "bench-watch.json").read_text()))
    (tmp_path / "probes" / "other.py").write_text("not what was measured")
    (code.parent / "a.cpython-311.pyc").write_text("bytecode")
    assert figures.earlier(kept) == ""
    code.write_text("A = 2")
    assert figures.earlier(kept) == ", with earlier code"
    assert ", with earlier code:" in figures.bars(kept)
    without = {key: value for key, value in kept.document.items() if key != "code"}
    assert figures.earlier(Results("bench-watch.json", without)) == ", with earlier code"


def test_what_a_bench_measures_is_there() -> None:
    for bench, paths in board.MEASURED.items():
        assert [path for path in paths if not (ROOT / path).exists()] == [], bench
    assert board.measured("placement-times") == board.measured("placement")
    assert board.measured("anything new") == ("buildtool", "probes", "images")


def test_a_part_of_a_bench_leaves_the_last_results_alone(tmp_path: Path) -> None:
    board = Board("x", whole=False, results=tmp_path)
    board.bar("ratio", 0.3, 0.4, "1")
    assert board.finish() == 0
    assert not list(tmp_path.iterdir())


SAMPLE = [
    *({"figure": f"{name}: build", "value": 12.34, "each": [12, 13]} for name in ("ours", "naive", "fair")),
    *(
        {"figure": f"{name}: {kind}", "value": 177_223_000}
        for name in ("ours", "naive", "fair")
        for kind in ("stored", "unpacked")
    ),
    *({"figure": f"start to ready, {way} bytecode", "value": 2.5} for way in ("without", "with")),
    {"figure": "bytecode left out", "value": 98_000_000},
    *(
        {"bar": name, "value": 0.5, "must_be": "at most", "limit": 3, "unit": "s", "ok": True}
        for name in ("build-ratio", "build-ratio-fair", "rebuild-unchanged", "rebuild-service-changed")
    ),
    {"bar": "images from nothing", "value": 236.4, "must_be": "at most"}
    | {"limit": 300, "unit": "s", "ok": True},
    {"figure": "printed", "value": "image  digest\nweir/cpu:latest  sha256:0"},
    {"figure": "rocm: unpruned root file system", "value": 5_020_000_000},
    *(
        {"bar": f"rocm {card}: unpacked", "value": 1_380_000_000, "must_be": "at most"}
        | {"limit": 2_000_000_000, "unit": "bytes", "ok": True}
        for card in ("gfx906", "gfx1100")
    ),
    *(
        {"bar": f"librocblas.so.0 {card}: {what}", "value": seen, "must_be": "at most"}
        | {"limit": 3, "unit": "x", "before_bytes": 450_000_000, "ok": what == "size"}
        for card, seen in (("gfx906", 0.126), ("gfx1100", 0.132))
        for what in ("size", "time")
    ),
    {"bar": "launches", "value": None, "waived": "no GPU"},
]  # fmt: skip


@pytest.fixture
def sample() -> Results:
    return Results(
        "bench-x.json",
        {
            "bench": "x",
            "command": "make bench-x",
            "date": "2026-11-21",
            "cores": 2,
            "load": [0.1, 2.0],
            "rows": SAMPLE,
        },
    )


def test_builds_are_reported_with_the_fair_baseline_and_the_start_cost(sample: Results) -> None:
    told = figures.build_block(sample)
    assert "| the same without bytecode, compressed as ours is | 12.3 s | 177 MB | 177 MB |" in told
    assert "Without 98 MB of bytecode a container" in told.replace("\n", " ")
    assert "other work" not in told


def test_a_bench_beside_other_work_says_so(sample: Results) -> None:
    busy = Results(sample.file, {**sample.document, "load": [7.3, 7.0]})
    assert "on a machine with other work: load 7.3" in figures.build_block(busy).replace("\n", " ")


def test_what_make_images_printed_stands_in_a_fence_of_its_own(sample: Results) -> None:
    told = figures.images_block(sample).split("\n")
    assert told[1:4] == ["", "```console", told[3]]
    assert "3:56 from nothing on 2 cores" in told[3]
    assert "weir/cpu:latest  sha256:0" in told
    assert told[-3].startswith(f"`make bench-images`, {sample.document['date']}")


def test_pruned_sizes_become_tables(sample: Results) -> None:
    assert "| unpacked | 5.02 GB | 1.38 GB | 1.38 GB |" in figures.prune_images(sample)
    assert "| librocblas.so.0 | 450 MB | 12.6% | 13.2% | 0.126 to 0.132 |" in figures.prune_libraries(sample)


def test_what_a_gpu_could_not_show_and_what_others_took_stand_in_the_table() -> None:
    rows = [
        {"bar": "bits", "value": 0, "must_be": "at most", "limit": 0, "unit": "elements", "ok": True},
        {"bar": "large model", "value": None, "waived": "CUDA out of memory. Tried to allocate"},
        {"figure": "accelerate", "value": 219.867, "unit": "ms"},
        {"figure": "first load", "value": 10.3, "unit": "s"},
    ]
    document = {
        "bench": "x",
        "command": "x",
        "date": "2026-11-22",
        "cores": 16,
        "load": [0.1, 0.1],
        "rows": rows,
    }
    told = figures.on_a_gpu(Results("bench-x.json", document)).split("\n")
    assert "| large model | | not judged: CUDA out of memory |" in told
    assert "| accelerate | 220 ms |" in told
    assert not [line for line in told if "first load" in line]


def test_bars_that_differ_in_a_number_alone_share_a_row(sample: Results) -> None:
    lines = figures.bars(sample).split("\n")
    assert "| size | at most 3 x | 0.126 to 0.132 (2 times) |" in lines
    assert "| time | at most 3 x | 0.126 to 0.132 (2 times), **missed** |" in lines
    assert "| images from nothing | at most 300 s | 236 |" in lines
    assert not [line for line in lines if "launches" in line]


def test_every_missed_bar_stands_on_the_evidence_page() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for results in figures.load(figures.EVERY_BENCH):
        for row in results.document["rows"]:
            if "bar" in row and row["value"] is not None and not row["ok"]:
                assert f"| {row['bar']} |" in page, results.file

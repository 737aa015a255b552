"""The verbs that write a report in another form: what they need, what they leave alone, and by which name."""

import json
import sys
from pathlib import Path

import pytest
from probe_samples import done, report

from buildtool.cli.program import main as buildtool_main
from probes.cli.program import main
from probes.core.codec import to_json
from probes.core.errors import Exit


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    path.write_text(to_json(report(done("transfer"))))
    return path


def test_both_command_lines_print_the_same_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert buildtool_main(["probe", "schema"]) == 0
    assert capsys.readouterr().out == printed
    assert json.loads(printed)["$schema"].startswith("https://json-schema.org/")


def test_a_page_without_the_library_that_draws_it_names_what_to_install(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "probes.reports.run_charts", None)
    assert main(["html", str(kept)]) == Exit.DEVICE
    assert "pip install 'gpu-weir[report]'" in capsys.readouterr().err
    assert main(["prometheus", str(kept)]) == 0
    assert not kept.with_suffix(".html").exists()


def test_a_page_that_can_not_be_written_is_named(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept.parent / "taken").write_text("")
    out = kept.parent / "taken" / "page.html"
    assert main(["html", str(kept), "--out", str(out)]) == Exit.DATA
    assert f"can't write {out}" in capsys.readouterr().err


def test_a_page_is_written_beside_its_report(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["html", str(kept)]) == 0
    assert capsys.readouterr().out == f"wrote {kept.with_suffix('.html')}\n"
    assert kept.with_suffix(".html").read_text().startswith("<!doctype html>")


def test_matplotlib_may_ask_for_fonts_in_an_account_that_has_drawn_nothing_yet() -> None:
    from matplotlib import font_manager

    assert isinstance(font_manager._get_fontconfig_fonts.__wrapped__(), list)


@pytest.mark.parametrize("name", [".", "/", "..", "loop"])
def test_what_cannot_be_a_report_is_no_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for words in (["html", name], ["run", "--resume", name], ["show", name]):
        assert main(words) == Exit.DATA
        assert capsys.readouterr().err.startswith("error: ")


def test_a_page_in_a_loop_of_links_is_no_traceback(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = kept.with_name("loop.html")
    out.symlink_to(out)
    assert main(["html", str(kept), "--out", str(out)]) == Exit.DATA
    assert f"can't write {out}: Too many levels of symbolic links" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["html"], ["show"], ["prometheus"], ["compare", "--force"]])
def test_the_report_of_an_audit_is_named_with_what_shows_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.json"
    path.write_text(
        json.dumps({"schema_version": 1, "image": {}, "findings": [], "budget": {}, "layers": []})
    )
    assert main([*words, str(path), *([str(path)] if words[0] == "compare" else [])]) == Exit.DATA
    assert capsys.readouterr().err == (
        f"error: {path} is not a probe report: it is the report of an audit\n"
        f"  weir audit {path} --html PAGE.html\n"
    )


@pytest.mark.parametrize(
    ("words", "makers"),
    [
        (["html"], "run, throughput, watch, fit, epochs"),
        (["show"], "run, throughput, watch, fit, epochs"),
        (["compare", "other.json"], "run, throughput"),
        (["prometheus"], "run, throughput"),
    ],
)
@pytest.mark.parametrize("content", [None, b"{}", b"[", b"\xff"])
def test_a_file_that_is_no_report_is_answered_with_every_verb_whose_report_it_could_be(
    words: list[str], makers: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing.json"
    if content is not None:
        path.write_bytes(content)
    assert main([words[0], str(path), *words[1:]]) == Exit.DATA
    said = capsys.readouterr().err
    assert str(path) in said
    hint = said.splitlines()[-1]
    assert hint.endswith(makers) or content == b"{}"

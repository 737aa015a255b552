"""The audit's answer in five lines: the largest remedy leads, with a command that fits the image."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import image_maker as make
import jsonschema
import pytest
from contents_maker import A, L, contents, facts
from report_maker import HOSTILE, a_finding, small_report, with_findings

from buildtool.audit import audit
from buildtool.audit.answer import answer_lines, largest_remedy, remedies
from buildtool.audit.counts import Facts
from buildtool.audit.diff import diff
from buildtool.audit.diff_json import DiffDocument, diff_document, render_diff_json
from buildtool.audit.findings import Severity, card_choice, card_savings, find_waste
from buildtool.audit.html import render_html
from buildtool.audit.report import AuditReport, GpuCode, make_report, parse_report, to_json
from buildtool.audit.text import render_markdown, summary_row
from buildtool.cli import audit as audit_command
from buildtool.cli import diff as diff_command
from buildtool.core.errors import ConfigError
from buildtool.core.model import Budget
from buildtool.engine.reference import alike
from buildtool.gpucode.target import PROCESSORS
from probes.core import output
from probes.core.codec import decode, load

ROOT = Path(__file__).parents[3]
MB = 1_000_000
ROCBLAS = "usr/lib/rocblas/library/Kernels_"
CARDS = L(
    {
        f"{ROCBLAS}gfx906.hsaco": 10 * MB,
        f"{ROCBLAS}gfx1030.hsaco": 20 * MB,
        f"{ROCBLAS}gfx1100.hsaco": 30 * MB,
    }
)
SAVED = {"gfx1100": 30 * MB, "gfx1030": 40 * MB, "gfx906": 50 * MB}


def library(**code: int) -> A:
    """A library with room for its code by target."""
    return A(sum(code.values()) + MB, code=code)


def reported(found: Facts) -> AuditReport:
    return make_report(contents(CARDS), found, Budget(), "test")


def coloured(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True, **env: str) -> str:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: terminal))
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return output.paint("x", output.Style.BAD)


def test_what_keeping_one_card_saves_is_the_code_of_the_others() -> None:
    assert card_savings(facts(CARDS)) == SAVED


def test_thousands_of_invented_targets_are_no_cards_to_choose_from() -> None:
    names = {f"gfx{n:x}": 100 for n in range(0x1000, 0x2000) if f"{n:x}"[:3].isdigit()}
    code = names | {"gfx906": MB, "gfx1030": MB}
    found = facts(L({"usr/lib/a.so": A(9 * MB, code=code)}))
    assert set(card_savings(found)) <= {"gfx906", *PROCESSORS}
    assert len(card_savings(found)) < 100
    assert card_savings(found)["gfx906"] == sum(code.values()) - MB


def test_a_library_that_a_prune_leaves_whole_is_no_saving() -> None:
    only_906 = L({"usr/lib/a.so": library(gfx906=4 * MB), "usr/lib/b.so": library(gfx906=MB, gfx1100=2 * MB)})
    assert card_savings(facts(only_906)) == {"gfx1100": MB, "gfx906": 2 * MB}


def test_the_choice_of_a_card_leads_and_is_an_upper_bound() -> None:
    report = reported(facts(CARDS))
    first = report.findings[0]
    assert (first.id, first.severity, first.bytes) == ("gpu-code-by-card", Severity.INFO, 50 * MB)
    assert first.predicted_unpacked_bytes == 10 * MB
    assert summary_row(report).biggest_finding == "gpu-code-by-card: up to 50.00 MB"
    assert report.prediction is not None
    assert report.prediction.saved_bytes == 0  # a choice is no waste


def test_no_command_names_a_card_that_the_image_has_no_code_for() -> None:
    for host in ((), ("gfx90a",), ("gfx1030",)):
        finding = card_choice(replace(facts(CARDS), host_cards=host))
        assert finding
        card = "gfx1030" if host == ("gfx1030",) else "gfx1100"  # else the one that promises least
        assert finding.remedy.startswith(f"weir prune --targets {card} -- weir/x:1\n")
        assert ("this machine's card" in finding.remedy) == (host == ("gfx1030",))


def test_cards_of_the_label_are_the_choice_but_those_of_the_command_line_are_needed() -> None:
    label = {"io.weir.gpu-targets": "gfx906,gfx1100"}
    labelled = facts(CARDS, labels=label)
    assert card_savings(labelled) == {"gfx1100": 30 * MB, "gfx906": 50 * MB}
    assert card_choice(replace(labelled, all_needed=True)) is None
    assert [row.id for row in find_waste(replace(labelled, all_needed=True))] == ["foreign-gfx"]


def test_code_for_one_card_leaves_nothing_to_choose() -> None:
    assert card_choice(facts(L({f"{ROCBLAS}gfx906.hsaco": 10 * MB}))) is None
    assert card_choice(facts(L({"usr/lib/a.so": library(sm_80=9 * MB, sm_90=9 * MB)}))) is None


def test_the_answer_has_five_lines_and_the_exact_command() -> None:
    lines = answer_lines(reported(facts(CARDS)))
    assert len(lines) == 5
    assert lines[1].startswith("first: 60.00 MB (")
    assert "for 3 cards (gfx906, gfx1030, gfx1100)" in lines[1]
    assert lines[1].endswith(
        "saves 30.00 MB unpacked (gfx1100) to 50.00 MB (gfx906): weir prune --targets gfx1100 -- weir/x:1"
    )
    assert lines[3].startswith("budget: none set")
    assert "--all" in lines[4]


def test_two_findings_with_one_command_are_one_remedy_of_both_sizes() -> None:
    prune = "weir prune --targets gfx906 -- x"
    rows = (a_finding("foreign-gfx", n_bytes=5), a_finding("foreign-gfx-in-libraries", n_bytes=7))
    [one] = remedies(with_findings(*(replace(row, remedy=prune) for row in rows)))
    assert (one.n_bytes, one.command) == (12, prune)


def test_an_error_is_told_first_and_the_largest_waste_still_follows() -> None:
    wrong = a_finding("secrets", n_bytes=1, severity=Severity.ERROR, title="credentials", remedy="RUN a")
    other = a_finding("cuda-in-cpu-image", n_bytes=2, severity=Severity.ERROR, remedy="RUN b")
    waste = a_finding(n_bytes=9 * MB, remedy="RUN rm -rf x")
    lines = answer_lines(with_findings(wrong, other, waste))
    assert lines[1].startswith("error: ")
    assert "9.00 MB" in lines[2]
    assert "3 findings (2 errors)" in lines[4]


def test_a_warning_that_is_not_about_size_is_in_the_answer() -> None:
    """A torch that can't use the card was named by `--all` alone."""
    torch = a_finding("cpu-torch", n_bytes=0, severity=Severity.WARNING, title="a CPU build of torch")
    large, small = a_finding(n_bytes=9 * MB, remedy="RUN a"), a_finding(n_bytes=2 * MB, remedy="RUN b")
    lines = answer_lines(with_findings(torch, large, small))
    assert lines[1].startswith("first: ")
    assert lines[2].startswith("warning: a CPU build of torch")


def test_what_has_to_be_done_before_a_command_is_told_with_it() -> None:
    """`weir build -- rocm` alone makes the same image again."""
    remedy = "# make a GPU build of torch reachable; then\nweir build -- rocm"
    torch = a_finding("cpu-torch", n_bytes=0, severity=Severity.WARNING, title="a CPU build", remedy=remedy)
    told = answer_lines(with_findings(torch))[1]
    assert told.endswith(": a CPU build; make a GPU build of torch reachable; then: weir build -- rocm")


@pytest.mark.parametrize(
    ("remedy", "shown"),
    [
        ("# first\nweir build -- rocm", "weir build -- rocm"),
        ("RUN rm -rf x   # files that aren't needed", "RUN rm -rf x"),
        ("RUN rm -rf '/a   # b'   # in a layer", "RUN rm -rf '/a   # b'"),
        ("RUN find a \\\n  -exec strip {} \\;   # then test", "RUN find a -exec strip {} \\;"),
        ("# only words", ""),
        ("RUN rm " + "x" * 400, ""),
    ],
)
def test_a_command_in_one_line_is_the_remedys_own(remedy: str, shown: str) -> None:
    [found] = remedies(with_findings(a_finding(remedy=remedy)))
    assert found.command == shown
    assert found.typed


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_of_an_image_acts_on_the_terminal_that_shows_the_answer(text: str) -> None:
    report = with_findings(a_finding(title=text, remedy=text or "x"))
    report = replace(report, image=replace(report.image, ref=text), kinds={text: 5})
    lines = answer_lines(report)
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coloured(monkeypatch) == "\x1b[1;31mx\x1b[0m"
    assert coloured(monkeypatch, terminal=False) == "x"
    assert coloured(monkeypatch, NO_COLOR="1") == "x"
    assert coloured(monkeypatch, TERM="dumb") == "x"


def test_all_is_asked_for_and_a_number_of_rows_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "r.json"
    saved.write_text(to_json(small_report()))
    parser = argparse.ArgumentParser()
    audit_command.add_arguments(parser)
    for words, sections in (([], False), (["--all"], True), (["--top", "3"], True)):
        audit_command.run(parser.parse_args([str(saved), *words]))
        told = capsys.readouterr().out
        assert ("Layers (bottom first)" in told) == sections
        assert told.count("\n") == 5 or sections


def test_pages_and_markdown_begin_with_the_largest_remedy() -> None:
    report = reported(facts(CARDS))
    page, summary = render_html(report), render_markdown(report)
    assert page.index("keeping one saves") < page.index("Where the bytes are")
    assert summary.index("largest remedy: ") < summary.index("## Layers")
    assert largest_remedy(replace(small_report(), findings=())) is None


def test_stored_bytes_of_gpu_code_are_said_to_be_unknown_and_why() -> None:
    """rocBLAS's code for gfx1100 compresses ten times better than its layer: no ratio can stand for it."""
    assert any("unknown: a layer is one compressed stream" in note for note in reported(facts(CARDS)).notes)
    assert not any("compressed stream" in note for note in small_report().notes)


def test_a_report_from_before_the_choice_of_cards_is_still_read() -> None:
    document = json.loads(to_json(reported(facts(CARDS))))
    document["image"]["config_digest"] = "sha256:" + "0" * 64
    del document["gpu_code"]["saved_by_card"]
    old = parse_report(json.dumps(document), "old.json")
    assert old.gpu_code == GpuCode(old.gpu_code.by_target, old.gpu_code.in_libraries)
    assert len(answer_lines(old)) == 5


def test_progress_has_a_percentage_only_of_a_total_that_holds() -> None:
    assert audit._part_read(50, 200) == "25 %, 50 B of 200 B"
    assert audit._part_read(300, 200) == audit._part_read(300, None) == "300 B"


def test_a_terminal_shows_how_much_of_an_archive_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(audit, "can_redraw", lambda: True)
    monkeypatch.setattr(audit, "redraw", drawn.append)
    monkeypatch.setattr(audit, "_REDRAW_EVERY_S", 0)
    archive = tmp_path / "image.tar"
    archive.write_bytes(make.archive(make.docker_25(make.Image([make.tar(make.file("x", bytes(9000)))]))))
    audit.audit_source(str(archive), audit.DEFAULT_OPTIONS, pull=False)
    assert any(" %, " in line for line in drawn)
    assert drawn[-1] == ""


# What a mistyped name may mean.


def test_a_mistyped_name_is_answered_with_what_the_engine_has() -> None:
    held = ("weir/rocm:latest", "weir/cpu:latest", "postgres:17")
    assert alike("weir/rocm:lates", held)[0] == "weir/rocm:latest"
    assert alike("rocm", held) == ("weir/rocm:latest",)
    assert alike("nginx", held) == ()


# The difference as JSON.

DIFF_SCHEMA = json.loads((ROOT / "docs/schema/audit-diff.schema.json").read_text())


def test_a_difference_as_json_keeps_to_its_schema_and_reads_back() -> None:
    after = with_findings(a_finding())
    difference = diff(small_report(), after)
    text = render_diff_json(difference)
    jsonschema.validate(json.loads(text), DIFF_SCHEMA)
    assert decode(DiffDocument, load(text), "diff") == diff_document(difference)
    [row] = json.loads(text)["findings"]
    assert (row["name"], row["before_bytes"], row["delta_bytes"]) == ("caches", None, 5_000_000)


def test_diff_prints_json_alone_or_writes_it_beside_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, written = tmp_path / "r.json", tmp_path / "d.json"
    saved.write_text(to_json(small_report()))
    parser = argparse.ArgumentParser()
    diff_command.add_arguments(parser)
    sides = [str(saved), str(saved)]
    diff_command.run(parser.parse_args([*sides, "--json"]))
    printed = capsys.readouterr().out
    assert json.loads(printed)["before"]["layers"] == 2
    diff_command.run(parser.parse_args([*sides, "--json", str(written)]))
    assert capsys.readouterr().out.startswith("A: ")
    assert written.read_text() == printed
    with pytest.raises(ConfigError):
        diff_command.run(parser.parse_args([*sides, "--json", "--format", "markdown"]))
    with pytest.raises(ConfigError):
        diff_command.run(parser.parse_args([*sides, "--json", str(saved)]))

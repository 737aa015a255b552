"""`weir probe prove` says what is right on a card, and refuses where there is none."""

import json

import pytest
import torch

from probes.cli.program import main
from probes.measure import proving
from probes.placement.packing import proof


def test_a_machine_without_a_card_is_refused_and_nothing_is_written(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    report = tmp_path / "proof.json"
    assert main(["prove", "--report", str(report)]) == 3
    assert "no card that torch can use" in capsys.readouterr().err
    assert not report.exists()


def as_if_there_were_a_card(monkeypatch):
    monkeypatch.setattr(proving, "card", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        proving, "machine", lambda device: {"card": "none", "target": "cpu", "triton": "none"}
    )
    monkeypatch.setattr(proving, "seconds_of", lambda begin: 0.5)


def test_a_report_has_every_case_with_its_bits_and_times(monkeypatch, tmp_path, capsys):
    as_if_there_were_a_card(monkeypatch)  # unpacked by torch's operations
    report = tmp_path / "proof.json"
    assert main(["prove", "--kernel", "unpack_b12", "--report", str(report)]) == 0
    assert "unpack_b12: 20 of 20 cases right" in capsys.readouterr().out
    document = json.loads(report.read_text())
    assert document["kind"] == "proof"
    assert len(document["cases"]) == 20
    assert all(row["median_s"] == 0.5 and "gfx1100" in row["recorded"] for row in document["cases"])


def test_a_wrong_bit_is_named_and_the_exit_code_says_so(monkeypatch, capsys):
    as_if_there_were_a_card(monkeypatch)
    right = proof.unpack

    def wrong(packed, out):
        right(packed, out).view(-1).view(torch.int16)[7] ^= 1
        return out

    monkeypatch.setattr(proof, "unpack", wrong)
    assert main(["prove", "--kernel", "unpack_b12"]) == 4
    assert "1 of 8,192 weights differ, the first at 7" in capsys.readouterr().out


@pytest.mark.parametrize("text", [b'{"a": ', b"", b"[]", b'{"a": 3}', b"\xff", b"[" * 100_000])
def test_recorded_results_that_are_not_whole_are_refused_before_anything_runs(
    monkeypatch, tmp_path, capsys, text
):
    as_if_there_were_a_card(monkeypatch)
    monkeypatch.setattr(proof, "RECORDED", tmp_path / "proof.json")
    proof.RECORDED.write_bytes(text)
    report = tmp_path / "report.json"
    assert main(["prove", "--kernel", "unpack_f28", "--report", str(report)]) == 5
    assert "install that again" in capsys.readouterr().err
    assert not report.exists()


def test_an_error_of_many_lines_is_one_line_of_the_summary(monkeypatch, capsys):
    as_if_there_were_a_card(monkeypatch)

    def broken(packed, out):
        raise RuntimeError("one\n\x1b[31mtwo")

    monkeypatch.setattr(proof, "unpack", broken)
    assert main(["prove", "--kernel", "unpack_b12"]) == 4
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 + 20
    assert "one \\x1b[31mtwo" in out


def test_a_kernel_that_does_not_exist_is_a_usage_error(monkeypatch):
    as_if_there_were_a_card(monkeypatch)
    assert main(["prove", "--kernel", "unpack_x"]) == 2


def test_the_cases_are_thirteen_kernels_in_twenty_cases_each_and_have_names_of_their_own():
    cases = list(proof.cases())
    kernels = {case.kernel for case in cases}
    assert len({case.name for case in cases}) == len(cases) == 20 * len(kernels) == 260

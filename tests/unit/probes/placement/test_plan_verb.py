"""`python3 -m probes plan`: what it answers, writes and refuses."""

import json
from pathlib import Path

import pytest

from probes.cli import main
from probes.errors import Exit
from probes.placement.planner.asking import plan
from probes.placement.values import Plan
from probes.shared.codec import decode

GIB = 2**30


def test_the_first_users_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen2.5-3b", "--vram", "4GiB", "--machine", "wx4100", "--context", "2048"]
    assert main(words) == Exit.OK
    said = capsys.readouterr().out
    assert "on AMD Radeon Pro WX 4100: runs" in said
    assert "tokens/s" in said
    assert "speeds: those of the profile wx4100, not measured here" in said
    assert "nothing here was measured on an AMD card" in said
    assert "no bfloat16 units" in said


@pytest.mark.thorough
def test_the_json_is_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "bert-base", "--vram", "1GiB", "--tokens", "128", "--json"]
    assert main([*asked, str(tmp_path / "p.json")]) == Exit.OK
    assert main([*asked, "-"]) == Exit.OK
    printed = capsys.readouterr().out
    written = (tmp_path / "p.json").read_text()
    assert printed.endswith(written)
    made = plan("bert-base", vram=GIB, machine="h200", tokens=128)
    assert decode(Plan, json.loads(written), "plan") == made


def test_an_impossible_budget_exits_1_with_the_smallest_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "qwen2.5-3b", "--tokens", "512", "--vram"]
    assert main([*asked, "16MiB"]) == Exit.REQUIRED
    said = capsys.readouterr().err
    assert "the smallest budget that works is" in said
    named = said.rpartition("--vram ")[2].split()[0].rstrip(";")
    assert main([*asked, named]) == Exit.OK


def test_too_little_host_memory_exits_1_with_the_smallest_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "qwen2.5-3b", "--vram", "1200MiB", "--host"]
    assert main([*asked, "1MiB"]) == Exit.REQUIRED
    named = capsys.readouterr().err.rpartition("--host ")[2].split()[0]
    assert main([*asked, named]) == Exit.OK


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no-such-model"], Exit.USAGE, "give a config.json"),
        (["owner/no-such-model"], Exit.USAGE, "hf download owner/no-such-model config.json"),
        (["bert-base", "--machine", "abacus"], Exit.USAGE, "profiles are wx4100"),
        (["bert-base", "--machine", "gone.json"], Exit.DATA, "gone.json"),
        (["bert-base", "--tokens", "9", "--context", "8"], Exit.USAGE, "no room for a prompt"),
        (["gone.safetensors"], Exit.DATA, "No such file"),
    ],
)
def test_what_makes_no_sense_is_said(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, "--vram", "4GiB"]) == code
    assert said in capsys.readouterr().err


def test_a_size_of_a_few_bytes_is_a_unit_that_was_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "bert-base", "--vram", "4"])
    assert "write 4GiB" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan", "bert-base", "--vram", "1GiB"], ["fit", "bert-base"]])
def test_a_picture_is_not_printed_nor_written_to_a_file_called_dash(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*words, "--picture", "-"])
    assert "name a file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_neither_the_model_nor_a_report_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, report = tmp_path / "model", tmp_path / "report.json"
    model.mkdir()
    (tmp_path / "link.json").symlink_to(report)
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text("{}")
    report.write_text("{}")
    for words in (
        [str(model), "--json", str(model / "config.json")],
        [str(model), "--picture", str(model / "model.safetensors")],
        [str(model), "--json", str(model / "model.safetensors.index.json")],
        [str(model / "model.safetensors"), "--json", str(model / "model.safetensors")],
        ["bert-base", "--machine", str(report), "--json", str(tmp_path / "link.json")],
        ["bert-base", "--json", str(tmp_path / "new"), "--picture", str(tmp_path / "new")],
    ):
        assert main(["plan", *words, "--vram", "1GiB"]) == Exit.USAGE
        assert "is what this command reads or writes already" in capsys.readouterr().err
    assert {path.read_text() for path in (*model.iterdir(), report)} == {"{}"}

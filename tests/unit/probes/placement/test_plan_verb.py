"""`python3 -m probes plan`: what it answers, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from probes.cli.program import main
from probes.core.codec import decode
from probes.core.errors import Exit, UsageError
from probes.placement.models.reading import describe
from probes.placement.plan_file import read_plan
from probes.placement.planner.api import plan, plan_cards
from probes.placement.types import Plan

HERE = ("--machine", "h200")
GIB = 2**30


@pytest.mark.thorough
def test_the_first_users_question_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen2.5-3b", "--vram", "4GiB", "--machine", "wx4100", "--context", "2048"]
    assert main(words) == Exit.OK
    said = capsys.readouterr().out
    assert "on AMD Radeon Pro WX 4100: can be placed" in said  # whether a torch runs there, doctor says
    assert "tokens/s" in said
    assert "speeds: those of the profile wx4100, not measured here" in said
    assert "nothing here was measured on an AMD card" in said
    assert "no bfloat16 units" in said


@pytest.mark.thorough
def test_the_json_is_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "bert-base", *HERE, "--vram", "1GiB", "--tokens", "128", "--json"]
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
    asked = ["plan", "qwen2.5-3b", *HERE, "--tokens", "512", "--vram"]
    assert main([*asked, "16MiB"]) == Exit.REQUIRED
    said = capsys.readouterr().err
    assert "the smallest budget that works is" in said
    named = said.rpartition("--vram ")[2].split()[0].rstrip(";")
    assert main([*asked, named]) == Exit.OK


@pytest.mark.thorough
def test_too_little_host_memory_exits_1_with_the_smallest_that_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "qwen2.5-3b", *HERE, "--vram", "1200MiB", "--host"]
    assert main([*asked, "1MiB"]) == Exit.REQUIRED
    named = capsys.readouterr().err.rpartition("--host ")[2].split()[0]
    assert main([*asked, named]) == Exit.OK


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no-such-model"], Exit.USAGE, "give a config.json"),
        (["owner/no-such-model"], Exit.USAGE, "hf download owner/no-such-model config.json"),
        (["bert-base", "--machine", "abacus"], Exit.USAGE, "name a card"),
        (["bert-base", "--machine", "gone.json"], Exit.DATA, "gone.json"),
        (["bert-base", "--tokens", "9", "--context", "8"], Exit.USAGE, "no room for a prompt"),
        (["gone.safetensors"], Exit.DATA, "No such file"),
    ],
)
def test_what_makes_no_sense_is_said(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *HERE, *words, "--vram", "4GiB"]) == code
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
        said = capsys.readouterr().err
        assert "is what this command reads or writes already" in said or "is a file of the model's" in said
    assert {path.read_text() for path in (*model.iterdir(), report)} == {"{}"}


@pytest.mark.parametrize("option", ["--json", "--picture"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.model", "text_encoder/config.json"])
@pytest.mark.parametrize("verb", [("plan", "--vram", "1GiB"), ("fit",)])
def test_no_file_of_a_models_folder_is_written_over(
    verb: tuple[str, ...], name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder_of_a_model(tmp_path)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text('{"do_sample": true}')
    (tmp_path / "link").symlink_to(model)
    for given in (model, tmp_path / "link", model / "config.json"):
        assert main([*verb, str(given), option, str(model / name)]) == Exit.USAGE
        assert "is a file of the model's folder" in capsys.readouterr().err
    assert (model / name).read_text() == '{"do_sample": true}'


def test_a_plan_kept_in_the_models_folder_may_be_made_again(tmp_path: Path) -> None:
    model = folder_of_a_model(tmp_path)
    kept, drawn = model / "plan.json", model / "plan.svg"
    for budget in ("1GiB", "2GiB"):
        words = ["plan", str(model), *HERE, "--vram", budget, "--json", str(kept), "--picture", str(drawn)]
        assert main(words) == Exit.OK
    assert json.loads(kept.read_text())["vram_budget"] == 2 * GIB


def folder_of_a_model(parent: Path) -> Path:
    model = parent / "model"
    model.mkdir()
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100}
    (model / "config.json").write_text(json.dumps({**config, "n_positions": 2048}))
    return model


@pytest.mark.thorough
@pytest.mark.parametrize(
    "verb", [("plan", "bert-base", *HERE, "--vram", "1GiB"), ("fit", "bert-base", *HERE, "--tokens", "8")]
)
def test_a_file_makes_no_folder_outside_of_the_current_one(
    verb: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (tmp_path / "nope" / "x.json", Path("../nope/x.json"), Path("in/../../nope/x.json")):
        assert main([*verb, "--json", str(place)]) == Exit.DATA
        assert f"make it: mkdir -p -- {tmp_path / 'nope'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]
    assert main([*verb, "--json", "reports/new/x.json"]) == Exit.OK
    assert (tmp_path / "here/reports/new/x.json").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize("cards", ["1", "2"])
def test_more_vram_than_the_card_has_is_refused(cards: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "qwen2.5-3b", "--machine", "wx4100", "--cards", cards, "--vram"]
    assert main([*words, "400GiB"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert "--vram is 400.00 GiB, and AMD Radeon Pro WX 4100 has 4.00 GiB" in said
    assert "give --vram 4GiB or less" in said
    assert main([*words, "4GiB"]) == Exit.OK
    assert "the card has 3.71 GiB, less than the budget" in capsys.readouterr().out
    assert main([*words, "3.5GiB"]) == Exit.OK
    assert "less than the budget" not in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("cards", ["1", "2"])
def test_a_profiles_host_memory_is_one_stated_size_whatever_the_model(
    cards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "llama-3.1-70b", "--machine", "mi210", "--vram", "24GiB", "--cards", cards]
    assert main(words) == Exit.OK
    said = capsys.readouterr().out
    assert said.count("64.00 GiB of host memory are assumed: --host says how much there is") == 1
    assert "some are read from disk in each pass" in said
    assert main([*words, "--host", "400GiB"]) == Exit.OK
    said = capsys.readouterr().out
    assert "are assumed" not in said
    assert "from disk" not in said


@pytest.mark.thorough
def test_a_model_that_the_assumed_host_memory_cannot_hold_does_not_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A WX 4100's host had 581 GB for a model of 70 billion weights."""
    words = ["plan", "llama-3.1-70b", "--machine", "wx4100", "--vram", "4GiB"]
    assert main(words) == Exit.REQUIRED
    said = capsys.readouterr().err
    assert "4.00 GiB of VRAM and 64.00 GiB of host memory, which is assumed" in said
    named = said.rpartition("--host ")[2].split()[0]
    assert main([*words, "--host", named]) == Exit.OK


@pytest.mark.thorough
def test_a_plan_with_a_profile_keeps_to_the_assumed_host_memory() -> None:
    for model in ("llama-3.1-70b", "bert-base"):
        made = plan(model, vram=24 * GIB, machine="mi210")
        assert made.host_budget == 64 * GIB
        assert made.host.total <= 64 * GIB


@pytest.mark.parametrize("cards", ["1", "2"])
@pytest.mark.parametrize("option", ["--tokens", "--context"])
def test_a_sequence_longer_than_the_models_table_of_positions_does_not_run(
    option: str, cards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(folder_of_a_model(tmp_path)), *HERE, "--vram", "1GiB", "--cards", cards, option]
    assert main([*words, "2049"]) == Exit.USAGE
    assert "has 2,048 learned positions, and 2,049 tokens are asked for" in capsys.readouterr().err
    assert main([*words, "2048"]) == Exit.OK


def test_a_sequence_longer_than_rotary_positions_in_the_config_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = {"model_type": "qwen2", "intermediate_size": 128, "max_position_embeddings": 2048, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", str(tmp_path), *HERE, "--vram", "4GiB", "--tokens"]
    assert main([*words, "2048"]) == Exit.OK
    assert "wasn't trained" not in capsys.readouterr().out
    assert main([*words, "5000"]) == Exit.OK
    assert "the model's config knows 2,048 positions" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("verb", [("plan", *HERE, "--vram", "1GiB"), ("fit", *HERE, "--tokens", "8")])
def test_a_folder_without_a_model_hides_no_known_models_name(
    verb: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bert-base").mkdir()
    assert main([*verb, "bert-base"]) == Exit.OK
    Path("bert-base/notes.txt").touch()
    assert main([*verb, "bert-base"]) == Exit.OK
    assert "bert-base" in capsys.readouterr().out
    Path("bert-base/config.json").write_text('{"model_type": "blenderbot"}')
    assert main([*verb, "bert-base"]) == Exit.USAGE
    Path("bert-base/config.json").unlink()
    Path("bert-base/pytorch_model.bin").touch()
    assert main([*verb, "bert-base"]) == Exit.DATA
    assert "its weights are pickles" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [None, 5, b"x", [], True, "", "a\0b", "\ud800", object()], ids=repr)
def test_what_is_no_path_is_said_by_every_name_that_takes_one(bad: Any) -> None:
    model = describe("bert-base")
    for asked, what in (
        (lambda: plan(bad, vram=GIB, machine="h200"), "the model is "),
        (lambda: plan(model, vram=GIB, machine=bad), "the machine is "),
        (lambda: plan_cards(model, cards=1, vram=GIB, machine=bad), "the machine is "),
        (lambda: read_plan(bad), "the plan is "),
    ):
        with pytest.raises(UsageError, match=what):
            asked()


def test_a_folder_that_is_to_be_made_is_quoted_for_the_shell_that_it_is_pasted_into(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "no; touch owned" / "plan.json"
    assert main(["plan", "bert-base", "--vram", "4GiB", "--json", str(place)]) == Exit.DATA
    assert f"mkdir -p -- '{place.parent}'" in capsys.readouterr().err

"""`weir fits` from its command line: one screen about a model on a card, exit codes, what is asked back."""

import datetime
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildtool.cli import program
from buildtool.doctor.compatibility import compatibility
from buildtool.doctor.routes import best_of, supposed_routes
from buildtool.fits import card as fits_card
from buildtool.fits.answer import Asked, Change, ask
from buildtool.fits.card import ChosenCard, TorchAnswer, Torches, choose_card
from buildtool.fits.text import NO_TORCH, lines
from probes.core.errors import UsageError
from probes.core.units import typed_bytes
from probes.core.unknown import Unknown
from probes.fit.placed import whole_mib
from probes.hardware.cards import find_card
from probes.hardware.host_card import HostCard
from probes.placement.planner.api import resolve_model
from probes.placement.planner.machine import without_gpu

GIB = 1 << 30
MOST_LINES = 15
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TORCHES = Torches(compatibility(), "linux", datetime.date(2026, 11, 24))


def run(*words: str) -> int:
    return program.main(["fits", *words])


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder of a small model: nothing but its config."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2), encoding="utf-8")
    return str(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    run(*words, "--json")
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.thorough
def test_a_card_that_no_torch_computes_on_says_so_first_and_exits_1(
    capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    assert run(folder, "wx4100") == 1
    text = capsys.readouterr().out
    assert text.startswith(NO_TORCH)
    assert "would run, predicted" in text
    assert "on the CPU" in text
    assert text.endswith("weir doctor --card gfx803\n")


@pytest.mark.thorough
@pytest.mark.parametrize("card", ["mi50", "RTX 4090", "strix-halo", "rx 6700"])
@pytest.mark.parametrize("task", ["inference", "lora", "training"])
def test_the_answer_is_one_screen_and_exits_0_where_it_runs(
    capsys: pytest.CaptureFixture[str], folder: str, card: str, task: str
) -> None:
    assert run(folder, card, "--task", task) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= MOST_LINES
    assert "predicted" in text.splitlines()[0]
    assert text.splitlines()[-2] == "next, type:"


@pytest.mark.thorough
def test_what_is_too_large_for_card_and_host_exits_1_and_names_what_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("llama-3.1-70b", "mi50", "--host", "1GiB") == 1
    text = capsys.readouterr().out
    assert "doesn't run, predicted" in text
    assert "--host " in text
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.thorough
def test_the_size_of_memory_in_a_cards_name_counts(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    small, usual = shown(capsys, folder, "MI50 16GB"), shown(capsys, folder, "mi50")
    assert (small["card"]["vram_bytes"], usual["card"]["vram_bytes"]) == (16 * GIB, 32 * GIB)
    assert usual["card"]["also_sold_with_bytes"] == [16 * GIB]
    assert any("MI50 16GB" in note for note in usual["notes"])
    assert "'MI50 16GB'" in small["next_command"]


@pytest.mark.thorough
def test_the_command_to_type_next_can_be_typed(
    capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["weir"])
    for task in ("inference", "lora", "training"):
        words = shlex.split(shown(capsys, folder, "MI50 16GB", "--task", task)["next_command"])
        assert words[:2] == ["weir", "probe"]
        assert program.main(words[1:]) == 0
        capsys.readouterr()


@pytest.mark.thorough
def test_less_vram_and_host_memory_than_there_is_are_counted(
    capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    answer = shown(capsys, folder, "rtx4090", "--vram", "2GiB", "--host", "8GiB")
    assert answer["vram_budget_bytes"] == 2 * GIB
    assert (answer["host_budget_bytes"], answer["host_is_assumed"]) == (8 * GIB, False)
    assert "--host 8GiB" in answer["next_command"]
    assert run(folder, "rtx4090", "--vram", "48GiB") == 2
    assert "or another card" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("nonsense-9", "mi50"), ("bert-base", "nonsense 9000")])
def test_wrong_names_are_refused_and_others_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    assert run(*words) == 2
    refused = capsys.readouterr()
    assert not refused.out
    assert "nonsense" in refused.err


def here(monkeypatch: pytest.MonkeyPatch, *cards: HostCard) -> None:
    monkeypatch.setattr(fits_card, "host_cards", lambda: cards)


@pytest.mark.thorough
def test_without_a_card_the_hosts_own_is_taken(
    capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mi50 = HostCard("1002:66a1", (find_card("mi50"),), 16 * GIB - (16 << 20))
    here(monkeypatch, mi50, mi50)
    answer = shown(capsys, folder)
    assert answer["card"]["vram_bytes"] == 16 * GIB
    assert not answer["host_is_assumed"]
    assert "--machine" not in answer["next_command"]
    assert f"--host {typed_bytes(whole_mib(answer['host_budget_bytes']))}" in answer["next_command"]
    assert any("this host" in note for note in answer["notes"])


@pytest.mark.parametrize("several", [False, True])
def test_without_any_card_one_is_asked_for_with_examples(
    capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    cards = [HostCard("one", (find_card("mi50"),), GIB), HostCard("two", (find_card("4090"),), GIB)]
    here(monkeypatch, *(cards if several else ()))
    assert run(folder) == 2
    assert "weir fits MODEL 'MI50 16GB'" in capsys.readouterr().err


@pytest.mark.thorough
def test_more_sequences_at_once_are_what_helps_where_passes_wait_for_python() -> None:
    model = resolve_model("qwen2.5-0.5b")
    answer = ask(Asked("qwen2.5-0.5b"), model, choose_card("h100", TORCHES))
    assert isinstance(answer.change, Change)
    assert answer.change.name == "--batch 16"
    assert "about as long as one alone" in answer.change.costs


@pytest.mark.thorough
def test_where_a_step_does_not_fit_the_command_has_the_change_after_which_it_does() -> None:
    model = resolve_model("qwen2.5-3b")
    answer = ask(Asked("qwen2.5-3b", "lora"), model, choose_card("MI50 16GB", TORCHES))
    assert not answer.runs
    assert answer.next_command.endswith(" --checkpointing")


@pytest.mark.thorough
def test_a_card_without_a_profile_has_memory_and_a_torch_and_no_speed() -> None:
    turing, ampere = (choose_card(name, TORCHES) for name in ("RTX 2080 Ti", "RTX 3090"))
    assert turing.facts.vram_bytes == 11 * GIB
    assert (turing.facts.has_bfloat16_units, ampere.facts.has_bfloat16_units) == (False, True)
    answer = ask(Asked("bert-base"), resolve_model("bert-base"), turing)
    assert answer.runs
    assert not isinstance(answer.placement, Unknown)
    assert isinstance(answer.placement.speed, Unknown)
    assert "speed:      unknown (nobody has written a profile" in lines(answer)
    with pytest.raises(UsageError, match="8 or 12 GiB"):
        choose_card("rtx 3060", TORCHES)


@pytest.mark.thorough
def test_a_model_whose_activations_nobody_wrote_down_is_still_planned() -> None:
    answer = ask(Asked("mixtral-8x7b"), resolve_model("mixtral-8x7b"), choose_card("mi300x", TORCHES))
    assert answer.runs
    assert isinstance(answer.memory, Unknown)
    assert "whole:      unknown" in lines(answer)
    assert "tokens/s" in lines(answer)


@pytest.mark.thorough
def test_what_is_unknown_is_not_said_to_be_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    run("mixtral-8x7b", "mi300x", "--task", "lora")
    text = capsys.readouterr().out
    assert "whether LoRA of rank 16 fits is unknown" in text
    assert text.endswith("weir fits mixtral-8x7b mi300x\n")
    run("mixtral-8x7b", "7900xtx")
    text = capsys.readouterr().out
    assert "doesn't fit whole: the weights alone take 86.99 GiB" in text
    assert "s a token" in text.splitlines()[0]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-3B-Instruct", "someone/qwen2.5-3b-it"])
def test_a_known_model_may_be_named_as_a_hub_names_it(name: str) -> None:
    assert resolve_model(name).weight_bytes == resolve_model("qwen2.5-3b").weight_bytes


@pytest.mark.thorough
def test_what_helps_most_is_in_the_command_to_type_next() -> None:
    answer = ask(Asked("mixtral-8x7b"), resolve_model("mixtral-8x7b"), choose_card("7900xtx", TORCHES))
    assert not isinstance(answer.change, Unknown)
    assert answer.change.name in answer.next_command


def test_a_machine_without_a_gpu_computes_on_its_processors() -> None:
    machine = replace(without_gpu(8), host_bytes=8 * GIB)
    facts = replace(choose_card("mi50", TORCHES).facts, name="CPU", target="", vram_bytes=0, context_bytes=0)
    chosen = ChosenCard(facts, machine, "report.json", TORCHES.best(""))
    answer = ask(Asked("bert-base"), resolve_model("bert-base"), chosen)
    assert answer.has_room
    assert "torch:      unknown (there is no GPU)" in lines(answer)


def test_a_torch_that_computes_on_the_card_is_the_doctors_best_wherever_there_is_one() -> None:
    data = compatibility()
    without = set()
    for target in data.targets:
        for platform in ("linux", "wsl", "windows"):
            torches = replace(TORCHES, platform=platform)
            answer = torches.best(target.id)
            assert isinstance(answer, TorchAnswer)
            best = best_of(supposed_routes(target.id, platform, data, today=torches.today))  # type: ignore[arg-type]
            assert not answer.computes_on_card or (best and best.torch == answer.torch)
            if not answer.computes_on_card and platform == "linux":
                without.add(target.id)
    assert without == {"gfx803"}


@pytest.mark.thorough
def test_names_from_outside_reach_the_terminal_quoted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "mine\x1b[31m"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(QWEN2 | {"_name_or_path": "red\x1b[31m"}), encoding="utf-8")
    assert run(str(place), "mi50") == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "cannot be pasted" in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", ("qwen2.5-3b", "rx7900xtx")),
        ("docs/fits.md", ("llama-3.1-8b", "MI50 16GB")),
        ("docs/fits.md", ("qwen2.5-3b", "wx4100")),
    ],
)
def test_what_a_page_shows_of_an_answer_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], page: str, words: tuple[str, str]
) -> None:
    run(*words)
    printed = capsys.readouterr().out.splitlines()
    text = (Path(__file__).parents[3] / page).read_text(encoding="utf-8")
    after = text.partition(f"\n{next(line for line in printed if line.startswith(words[0]))}\n")[2]
    shown = after.split("\n```")[0].split("\n$ ")[0].splitlines()
    assert shown
    assert [line for line in shown if line not in printed] == []

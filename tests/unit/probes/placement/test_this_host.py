"""The machine that is planned for where none is named: this host's card, or a question."""

from pathlib import Path

import pytest
from probe_trees import card, lay

from probes.cli.program import main
from probes.core.errors import Exit, UsageError
from probes.core.unknown import Unknown
from probes.hardware.cards import GIB, find_card
from probes.hardware.host_card import HostCard, host_cards
from probes.placement.planner.api import this_hosts_machine
from probes.placement.planner.machine import profile
from probes.records.facts import NvidiaCard

NO = Unknown("not here")


def nvidia(name: str, gib: float) -> NvidiaCard:
    return NvidiaCard(name, "0000:01:00.0", NO, int(gib * GIB), NO, NO, NO, NO, NO)


def amd(tmp_path: Path, pci_id: str, gib: float) -> tuple[HostCard, ...]:
    uevent = f"DRIVER=amdgpu\nPCI_ID={pci_id.upper()}\nPCI_SLOT_NAME=0000:03:00.0"
    tree = card("card0", "0000:03:00.0", int(gib * GIB), GIB, uevent=uevent)
    return host_cards(lay(tmp_path, tree), nvidia=())


def test_the_card_of_this_host_is_planned_for_and_that_is_said(tmp_path: Path) -> None:
    made = this_hosts_machine(amd(tmp_path, "1002:67e3", 4))
    assert made.name == profile("wx4100").name
    assert made.vram_bytes == 4 * GIB
    assert "this host's card, Radeon Pro WX 4100" in made.notes[-1]
    assert (
        this_hosts_machine(host_cards(tmp_path / "none", [nvidia("NVIDIA H200", 140.4)])).name
        == "NVIDIA H200 SXM"
    )


def test_cards_that_share_a_pci_id_are_told_apart_by_their_memory(tmp_path: Path) -> None:
    (found,) = amd(tmp_path / "a", "1002:744c", 23.98)
    assert found.cards == (find_card("7900 XTX"),)
    (found,) = amd(tmp_path / "b", "1002:744c", 15.98)
    assert [card.name for card in found.cards] == ["Radeon RX 7900 GRE", "Radeon RX 7900M"]
    with pytest.raises(UsageError, match="could be Radeon RX 7900 GRE or Radeon RX 7900M"):
        this_hosts_machine([found])


def test_a_size_of_memory_is_this_hosts_own(tmp_path: Path) -> None:
    found = (HostCard("1002:66a1", (find_card("MI50"),), 16 * GIB),)
    made = this_hosts_machine(found)
    assert made.vram_bytes == 16 * GIB
    assert not any("assumed" in note for note in made.notes)


def test_a_processors_gpu_beside_a_card_is_not_asked_about(tmp_path: Path) -> None:
    here = (
        HostCard("1002:164e", (find_card("Raphael"),), GIB),
        HostCard("x", (find_card("RX 6800"),), 16 * GIB),
    )
    assert this_hosts_machine(here).name == profile("rx6800").name


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((), "no card was found"),
        ((HostCard("NVIDIA GPU X", (), NO),), "isn't in our list"),
        (
            (HostCard("a", (find_card("4090"),), NO), HostCard("b", (find_card("RX 6800"),), NO)),
            "several cards",
        ),
    ],
)
def test_a_host_that_does_not_say_which_machine_is_asked_for_one(
    found: tuple[HostCard, ...], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        this_hosts_machine(found)
    assert refused.value.hint.count("--machine") == 3


def test_a_card_of_this_host_without_a_profile_says_so() -> None:
    with pytest.raises(UsageError, match=r"this host's card: A100 PCIe .* has no profile"):
        this_hosts_machine(
            [HostCard("NVIDIA A100 80GB PCIe", (find_card("NVIDIA A100 80GB PCIe"),), 80 * GIB)]
        )


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["plan", "fit"])
def test_no_verb_takes_an_h200_for_granted(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("probes.placement.planner.api.host_cards", lambda: ())
    assert main([verb, "bert-base"]) == Exit.USAGE
    said = capsys.readouterr().err
    assert said.count("--machine") == 3
    here = (HostCard("NVIDIA GeForce RTX 4090", (find_card("4090"),), 24 * GIB),)
    monkeypatch.setattr("probes.placement.planner.api.host_cards", lambda: here)
    assert main([verb, "bert-base"]) == Exit.OK
    said = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 4090" in said
    assert "for this host's card, GeForce RTX 4090: --machine names another" in said


@pytest.mark.thorough
def test_without_vram_a_plan_has_all_of_the_cards_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bert-base", "--machine", "MI50 16GB"]) == Exit.OK
    assert "16.00 GiB of VRAM, all that the card has" in capsys.readouterr().out
    assert main(["plan", "bert-base", "--machine", "MI50 16GB", "--vram", "17GiB"]) == Exit.USAGE
    assert "--vram is 17.00 GiB, and AMD Instinct MI50 has 16.00 GiB" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["--vram", "--budget"])
def test_fit_has_two_names_for_one_limit_and_errors_have_the_one_typed(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["fit", "bert-base", "--machine", "wx4100", "--tokens", "64"]
    assert main([*asked, option, "2GiB"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "2.00 GiB" in shown
    assert main([*asked, option, "5GiB"]) == Exit.USAGE
    assert f"{option} is 5.00 GiB" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, option, "4"])
    assert f"argument {option}: '4' without a unit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--vram", "2GiB", "--budget", "3GiB"])

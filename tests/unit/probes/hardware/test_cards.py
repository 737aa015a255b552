"""Cards by their names: each spelling finds its card or is asked back; no answer is another card."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from buildtool.doctor.compatibility import compatibility
from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware.cards import (
    FILE,
    GIB,
    CardAmbiguous,
    CardUnknown,
    all_cards,
    cards_meant,
    find_card,
    find_target,
    named_card,
    sources,
    target_in,
)
from probes.placement.planner.machine import profile, profile_names, table

SPELT = Path(__file__).with_name("cards_spelt.txt").read_text(encoding="utf-8").splitlines()
SPELLINGS = [tuple(line.split(" | ", 1)) for line in SPELT if not line.startswith("#")]
ASKED_BACK = ("ambiguous", "unknown")


def answer(text: str) -> str:
    try:
        named = named_card(text)
    except CardAmbiguous:
        return "ambiguous"
    except CardUnknown:
        return "unknown"
    return named.card.name + (f" @{named.memory_bytes // GIB}" if named.memory_bytes else "")


@pytest.mark.thorough
def test_a_spelling_finds_its_card_and_never_another() -> None:
    assert {text: answer(text) for _, text in SPELLINGS} == {text: expected for expected, text in SPELLINGS}


def test_200_spellings_are_tried_and_more_than_half_name_a_card() -> None:
    assert len(SPELLINGS) == 200
    assert sum(expected not in ASKED_BACK for expected, _ in SPELLINGS) > 100


def test_every_card_is_found_by_its_makers_name() -> None:
    for card in all_cards():
        names = (card.name, f"{card.maker} {card.name}", card.name.upper(), card.name.replace(" ", "-"))
        if card.name == "TITAN X":  # there were two
            assert all(card in cards_meant(text) for text in names)
            continue
        assert [find_card(text) for text in names] == [card] * len(names)
        for size in card.memory_variants:
            assert named_card(f"{card.name} {size // GIB}GB").memory_bytes == size


def test_every_statement_has_a_source_and_every_pci_id_one_target() -> None:
    targets: dict[str, set[str]] = {}
    for card in all_cards():
        assert card.target_source in sources()
        assert card.memory_source in sources()
        for pci_id in card.pci_ids:
            targets.setdefault(pci_id, set()).add(card.target)
    assert {pci_id: found for pci_id, found in targets.items() if len(found) > 1} == {}
    assert max(Counter(card.name for card in all_cards()).values()) == 1


def test_doctors_pci_ids_agree_with_the_list_of_cards() -> None:
    """compatibility.yaml keeps PCI ids and targets for cards that are seen; this list says what they are."""
    for known in compatibility().cards:
        cards = [card for card in all_cards() if known.pci in card.pci_ids]
        assert cards, known
        assert {card.target for card in cards} == {known.target}
        if " to " not in known.product:  # doctor's own words for a PCI id can be typed
            assert find_target(known.product) == known.target


def test_every_profile_is_of_one_card_with_its_target_and_memory() -> None:
    by_profile = {card.profile: card for card in all_cards() if not isinstance(card.profile, Unknown)}
    assert set(by_profile) == set(profile_names())
    for name, card in by_profile.items():
        assert table()["machines"][name]["target"] == card.target
        if card.memory_variants:
            assert card.variant(profile(name).vram_bytes) is not None


@pytest.mark.parametrize(
    ("text", "not_this"),
    [
        ("RTX 4060", "Ti"),
        ("RX 7900 XT", "XTX"),
        ("MI300A", "MI300X"),
        ("MI250", "MI250X"),
        ("L40", "L40S"),
        ("A10", "A10G"),
        ("V100 PCIe", "V100S"),
        ("H100 PCIe", "SXM"),
    ],
)
def test_a_suffix_makes_another_card(text: str, not_this: str) -> None:
    assert not_this not in find_card(text).name


@pytest.mark.parametrize(
    "text",
    [
        "GeForce 6800 XT",
        "GeForce 8200",
        "GeForce 840M",
        "01:00.0 VGA compatible controller: NVIDIA Corporation GK106 [GeForce GTX 750 Ti] (rev a1)",
    ],
)
def test_a_number_of_one_maker_is_no_card_of_the_other_nor_of_another_chip(text: str) -> None:
    """The first six of 2,102 names in pci.ids that got another card's."""
    with pytest.raises(CardUnknown):
        find_card(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("01:00.0 3D controller: NVIDIA Corporation GA102GL [A40] (rev a1)", "A40"),
        ("01:00.0 3D controller [0302]: NVIDIA Corporation GA102GL [A10] [10de:2236] (rev a1)", "A10"),
        (
            "01:00.0 3D controller: NVIDIA Corporation TU102 [GeForce RTX 2080 Ti Rev. A] (rev a1)",
            "GeForce RTX 2080 Ti",
        ),
    ],
)
def test_a_name_in_brackets_is_not_taken_for_a_number(text: str, name: str) -> None:
    assert find_card(text).name == name


def test_a_pci_id_that_a_card_outside_the_list_has_too_is_asked_back() -> None:
    with pytest.raises(CardAmbiguous, match="did you mean Radeon Pro WX 8200"):
        find_card("1002:6868")
    assert find_target("1002:6868") == "gfx900"


@pytest.mark.parametrize(
    ("text", "target"),
    [("gfx1100", "gfx1100"), ("gfx90a:xnack-", "gfx90a"), ("sm89", "sm_89"), ("1002:744c", "gfx1100")],
)
def test_a_target_is_enough_where_only_that_is_needed(text: str, target: str) -> None:
    assert find_target(text) == target
    assert len(cards_meant(text)) > 1


@pytest.mark.parametrize("text", ["H", "L", "radeon", "RX"])
def test_letters_alone_are_no_target(text: str) -> None:
    with pytest.raises(CardAmbiguous):
        find_target(text)


def test_a_target_of_several_cards_is_asked_back_where_a_card_is_needed() -> None:
    with pytest.raises(CardAmbiguous, match="Radeon RX 7900 XTX") as refused:
        find_card("gfx1100")
    assert {card.target for card in refused.value.candidates} == {"gfx1100"}


def test_what_is_no_target_is_none() -> None:
    for text in ("gfx", "gfx1100x", "sm_", "sm_8900", "RX 7900"):
        assert target_in(text) is None


def test_an_unknown_name_says_which_cards_are_called_alike() -> None:
    with pytest.raises(CardUnknown, match=r"did you mean Radeon Pro WX 4100 \(gfx803\)"):
        find_card("wx 4101")
    with pytest.raises(CardUnknown) as refused:
        find_card("voodoo")
    assert "did you mean" not in refused.value.hint


def test_a_size_that_the_card_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(CardUnknown, match="Radeon Instinct MI50 has 16 or 32 GiB"):
        find_card("MI50 24GB")


@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "[]", "/", "x" * 10_000, "[" * 500, "4090" * 99, "(rev", "é½"]
)
def test_no_text_raises_anything_but_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        find_card(text)


def test_the_file_has_no_word_twice() -> None:
    words = tomllib.loads(FILE.read_text(encoding="utf-8"))["words"]
    assert not set(words["noise"]) & set(words["builders"])

"""GPUs by the names that people write: which card a text means, its target, its sizes of memory. Pure.

`cards.toml` is the one list of cards. A text may be a name in any spelling, with a size of memory
(`MI50 16GB`), a PCI id, a target, or a line of lspci, nvidia-smi or rocm-smi. A text that could mean several
cards is asked back and one that means none is refused: a suffix makes another card (`4060` and `4060 Ti`),
so no answer is a guess.
"""

import difflib
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from probes.core.errors import UsageError
from probes.core.unknown import Unknown

FILE: Final = Path(__file__).with_name("cards.toml")
GIB: Final = 2**30
MOST_CHARS: Final = 300  # of a text that is read as a name; lines of lspci have 100 to 200
NO_PROFILE: Final = Unknown("nobody has written a profile for this card")
_VENDOR_IDS: Final = {"AMD": "1002", "NVIDIA": "10de"}
_SHOWN: Final = 6  # candidates that an error names
_ALIKE: Final = 0.75  # the least similarity of names, from 0 to 1, for "did you mean"
# NVML and amdgpu report less than a card's nominal memory (error correction takes 1/16), and never more
_LEAST_SHARE, _MOST_SHARE = 0.90, 1.02


@dataclass(frozen=True)
class Card:
    """A card as its maker names it. Bytes."""

    name: str
    maker: Literal["AMD", "NVIDIA"]
    chip: str
    target: str  # gfx1100, sm_89
    memory_variants: tuple[int, ...]  # sizes that it was sold with; empty: it shares the machine's memory
    profile: str | Unknown  # in probes/placement/planner/profiles.toml
    pci_ids: tuple[str, ...]  # 1002:744c
    kinds: tuple[str, ...]  # of memory, where they tell cards of one name apart: hbm3
    host_sizes: tuple[int, ...]  # that the maker's name says, of the host's memory
    target_source: str
    memory_source: str

    def variant(self, n_bytes: int) -> int | None:
        """The size of memory that a card has of which a driver reports `n_bytes`; None: it has no such."""
        fits = [size for size in self.memory_variants if _LEAST_SHARE <= n_bytes / size <= _MOST_SHARE]
        return min(fits, key=lambda size: abs(size - n_bytes), default=None)


@dataclass(frozen=True)
class NamedCard:
    """The card that a text means, the size of memory that it says, and what was assumed."""

    card: Card
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()


class CardUnknown(UsageError):
    """No card of the list is meant."""


class CardAmbiguous(UsageError):
    """Several cards could be meant, or the name isn't whole; `candidates` are those it could be."""

    def __init__(self, message: str, hint: str, candidates: tuple[Card, ...]) -> None:
        super().__init__(message, hint)
        self.candidates = candidates


# ---- what may be asked ---------------------------------------------------------------------------------


def find_card(text: str) -> Card:
    """The card that a text means. Raises CardUnknown and CardAmbiguous, which are UsageErrors."""
    return named_card(text).card


def named_card(text: str) -> NamedCard:
    """The card that a text means, with the memory that it says. Raises CardUnknown and CardAmbiguous."""
    asked = _Asked.read(text)
    found = asked.found()
    if len(found.cards) == 1 and found.whole:
        return NamedCard(found.cards[0], asked.memory_of(found.cards[0]), found.notes)
    if not found.cards:
        raise _unknown(asked)
    raise _ambiguous(asked, found)


def cards_meant(text: str) -> tuple[Card, ...]:
    """All cards that a text could mean, for callers to whom what they share is enough. Raises CardUnknown."""
    asked = _Asked.read(text)
    found = asked.found()
    if not found.cards:
        raise _unknown(asked)
    return found.cards


def is_card(text: str) -> bool:
    """Whether a text means a card of the list, or several."""
    try:
        return bool(cards_meant(text))
    except CardUnknown:
        return False


def find_target(text: str) -> str:
    """The compute target of all cards that a text could mean. Raises CardUnknown and CardAmbiguous."""
    if target := target_in(text):
        return target
    asked = _Asked.read(text)
    found = asked.found()
    targets = {card.target for card in found.cards}
    if not targets:
        raise _unknown(asked)
    begun_only = not found.whole and not any(char.isdigit() for char in text)  # `H` begins H100 and H200
    if len(targets) > 1 or begun_only:
        raise _ambiguous(asked, found)
    return targets.pop()


def target_in(text: str) -> str | None:
    """The target that a text is, without its features: gfx90a for `gfx90a:xnack-`, sm_89 for `sm89`."""
    match = re.fullmatch(
        r"(gfx[0-9a-f]{3,4})(?::[\w+:-]*)?|(?:sm|compute)_?(\d{2,3})[a-z]?", text.strip().lower()
    )
    return match and (match[1] or f"sm_{match[2]}")


@cache
def all_cards() -> tuple[Card, ...]:
    """Every card of the list."""
    return tuple(card for card, _ in _rows())


# ---- the list ------------------------------------------------------------------------------------------


@cache
def _table() -> Mapping[str, Any]:
    with FILE.open("rb") as file:
        return tomllib.load(file)


def sources() -> Mapping[str, Mapping[str, str]]:
    """What the file's statements come from, by the names that it gives its sources."""
    known: Mapping[str, Mapping[str, str]] = _table()["sources"]
    return known


@cache
def _rows() -> tuple[tuple[Card, Mapping[str, Any]], ...]:
    """Every card with its row of the file."""
    return tuple((_card(family | row), row) for family in _table()["family"] for row in family["cards"])


def _card(row: Mapping[str, Any]) -> Card:
    maker: Literal["AMD", "NVIDIA"] = row["maker"]
    return Card(
        name=row["name"],
        maker=maker,
        chip=row["chip"],
        target=row["target"],
        memory_variants=tuple(size * GIB for size in row["gib"]),
        profile=row.get("profile", NO_PROFILE),
        pci_ids=tuple(f"{_VENDOR_IDS[maker]}:{number}" for number in row.get("pci", ())),
        kinds=tuple(kind.lower() for kind in row.get("kinds", ())),
        host_sizes=tuple(size * GIB for size in row.get("host_gib", ())),
        target_source=row["target_source"],
        memory_source=row["memory_source"],
    )


Words = tuple[str, ...]
# Words that a maker's product line has and people leave out
_BRANDS: Final = frozenset({"radeon", "instinct", "geforce", "tesla", "quadro", "pro"})


@cache
def _noise() -> frozenset[str]:
    """Words that say nothing about which card it is."""
    return frozenset(_table()["words"]["noise"])


@cache
def _builders() -> frozenset[str]:
    """Words of the companies that build cards, and of their lines."""
    return frozenset(_table()["words"]["builders"])


@dataclass(frozen=True)
class _Names:
    """The list's names as keys, a key being a name's letters and digits."""

    full: Mapping[str, tuple[Card, ...]]  # names as the file has them
    short: Mapping[str, tuple[Card, ...]]  # with words left out at the front
    usual: Mapping[str, Card]
    words: tuple[tuple[Words, Card], ...]  # of the names and of their ends
    chips: tuple[tuple[Words, str], ...]  # the longest first


@cache
def _names() -> _Names:
    full: dict[str, dict[Card, None]] = {}
    short: dict[str, dict[Card, None]] = {}
    usual: dict[str, Card] = {}
    words: list[tuple[Words, Card]] = []
    for card, row in _rows():
        for name in (row["name"], *row.get("also", ())):
            spelt = tuple(word for word in _split(name) if word not in _noise())
            full.setdefault("".join(spelt), {})[card] = None
            for left in _shortened(spelt):
                short.setdefault("".join(left), {})[card] = None
                words.append((_pieces(left), card))
        if "usual" in row:
            usual["".join(_split(row["usual"]))] = card
    chips = {
        (words, family["chip"])
        for family in _table()["family"]
        for name in (family["chip"], *family.get("also", ()))
        for words in (_split(name), ("".join(_split(name)),))  # Polaris 10 and Polaris10
    }
    return _Names(
        {key: tuple(cards) for key, cards in full.items()},
        {key: tuple(cards) for key, cards in short.items()},
        usual,
        tuple(dict.fromkeys(words)),
        tuple(sorted(chips, key=lambda chip: (-len(chip[0]), chip))),
    )


def _shortened(name: Words) -> Iterable[Words]:
    """A name, its ends that have a digit, and these without words of brands."""
    for start in range(len(name)):
        end = name[start:]
        if start == 0 or any(char.isdigit() for char in "".join(end)):
            yield end
            plain = tuple(word for word in end if word not in _BRANDS)
            if plain and any(char.isdigit() for char in "".join(plain)):
                yield plain


def _split(text: str) -> Words:
    """The words of a text, in lower case."""
    return tuple(re.findall(r"[a-z0-9]+", text.lower().replace("max-q", "maxq")))


def _pieces(words: Words) -> Words:
    """Words split where letters and digits meet: rx 7900 xtx."""
    return tuple(re.findall(r"[a-z]+|\d+", " ".join(words)))


# ---- what a text says ----------------------------------------------------------------------------------

_PCI: Final = re.compile(r"(?<![0-9a-f:])(?:0x)?([0-9a-f]{4}):(?:0x)?([0-9a-f]{4})(?![0-9a-f:])")
_HARDWARE_ID: Final = re.compile(r"ven_([0-9a-f]{4})&dev_([0-9a-f]{4})")  # as Windows shows it
_SIZE: Final = re.compile(r"(?<![a-z0-9.])(\d{1,3})[\s-]*(?:gib|gb|g)(?![a-z0-9])")
_SIZE_MIB: Final = re.compile(r"(?<![a-z0-9.])(\d{4,6})\s*(?:mib|mb)(?![a-z0-9])")
_KIND: Final = re.compile(r"(?<![a-z0-9])(?:hbm\d?e?|gddr\dx?)(?![a-z0-9])")
_REMARK: Final = re.compile(r"\((?:rev|uuid|prog-if|tm|r)\b[^()]*\)|[™®]|\s\(rev\b.*$|\brev\. \w\b")
_IDS: Final = re.compile(r"\[[0-9a-f]{4}\](?=:)|\[[0-9a-f]{4}:[0-9a-f]{4}\]|\[amd/ati\]")  # of lspci -nn
_CHIP_CODE: Final = re.compile(r"\b(g[abfhkmptv]|tu|ad)\d{2,3}[a-z]{0,3} ?\[")  # NVIDIA's, in lspci's lines
_MAKERS: Final = {
    **dict.fromkeys(("nvidia", "geforce", "tesla", "quadro"), "NVIDIA"),
    **dict.fromkeys(("amd", "ati", "radeon", "instinct"), "AMD"),
}
_ALTERNATIVES: Final = re.compile(r"/|,|\bor\b")
_BRACKETS: Final = re.compile(r"\[([^\][]*[a-z][^\][]*)\]")


@dataclass(frozen=True)
class _Found:
    """The cards that a text could mean. `whole`: it names each of them by a whole name."""

    cards: tuple[Card, ...] = ()
    whole: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """A text, taken apart."""

    text: str
    target: str | None
    pci_id: str | None
    names: tuple[Words, ...]  # `RX 470/480` are two
    memory: int | None  # bytes
    exact: bool  # the size of memory is the nominal one, not a driver's
    kind: str | None
    makers: frozenset[str]
    architecture: str | None  # the letters of NVIDIA's code of the chip

    @staticmethod
    def read(text: str) -> "_Asked":
        """Split a text into the words of a card's name."""
        lower = unicodedata.normalize("NFKC", text[:MOST_CHARS]).lower()
        ids = _HARDWARE_ID.search(lower) or next(
            (match for match in _PCI.finditer(lower) if match[1] in _VENDOR_IDS.values()), _PCI.search(lower)
        )
        code = _CHIP_CODE.search(lower)
        named = _product(_REMARK.sub(" ", _IDS.sub(" ", lower)))
        for phrase, same in _table()["words"]["phrases"].items():
            named = named.replace(phrase, same)
        size, reported, kind = _SIZE.search(named), _SIZE_MIB.search(named), _KIND.search(named)
        named = _KIND.sub(" ", _SIZE_MIB.sub(" ", _SIZE.sub(" ", named)))
        memory = int(size[1]) * GIB if size else int(reported[1]) << 20 if reported else None
        names = tuple(words for part in _ALTERNATIVES.split(named) if (words := _telling(part)))
        return _Asked(
            text.strip()[:MOST_CHARS],
            target_in(text),
            f"{ids[1]}:{ids[2]}" if ids else None,
            names,
            memory,
            bool(size),
            kind and kind[0],
            frozenset(_MAKERS[word] for word in _split(lower) if word in _MAKERS),
            code and code[1],
        )

    def found(self) -> _Found:
        """The cards that it could mean; those whose memory contradicts the text are left out."""
        if self.target:
            return _Found(tuple(card for card in all_cards() if card.target == self.target))
        if self.pci_id:
            cards = tuple(card for card in all_cards() if self.pci_id in card.pci_ids)
            return _Found(cards, whole=self.pci_id not in _table()["shared_pci"])
        found = [_named(words) for words in self.names]
        cards = tuple(dict.fromkeys(card for one in found for card in one.cards if self._agrees(card)))
        whole = all(one.whole and one.cards for one in found)
        notes = () if self.kind else tuple(note for one in found for note in one.notes)
        return _Found(cards, whole, notes)

    def _agrees(self, card: Card) -> bool:
        """Whether the card has the maker, the chip and the memory that the text says, if it says any."""
        if self.makers and card.maker not in self.makers:
            return False
        if self.architecture and card.chip[:2].lower() != self.architecture:
            return False
        kinds = not self.kind or not card.kinds or self.kind in card.kinds
        known = self.memory is None or self.memory in card.host_sizes or self.memory_of(card) is not None
        return kinds and known

    def memory_of(self, card: Card) -> int | None:
        """The card's size of memory that the text says."""
        if self.memory is None:
            return None
        if self.exact:
            return self.memory if self.memory in card.memory_variants else None
        return card.variant(self.memory)

    def named_otherwise(self) -> tuple[Card, ...]:
        """The cards that it names, whatever memory it says."""
        return tuple(dict.fromkeys(card for words in self.names for card in _named(words).cards))


def _product(line: str) -> str:
    """What names the product in a line of lspci or nvidia-smi: its brackets, or what follows a colon."""
    brackets = _BRACKETS.findall(line)
    return brackets[-1] if brackets else line.rpartition(": ")[2]


def _telling(name: str) -> Words:
    """The words of a name, without those that say nothing."""
    return tuple(word for word in _split(name) if word not in _noise())


def _named(words: Words) -> _Found:
    """The cards that a name means: by the whole name, else without the words of who built the card."""
    plain = tuple(word for word in words if word not in _builders())
    for name in dict.fromkeys((words, plain)):
        found = _by_key(name) if name else _Found()
        if found.cards:
            return found
    if "series" in plain:
        return _series(tuple(word for word in plain if word != "series"))
    by_chip = _by_chip(plain)
    return by_chip if by_chip.cards else _Found(_beginning(plain), whole=False)


def _beginning(words: Words) -> tuple[Card, ...]:
    """The cards whose name, or an end of it, begins with these words."""
    begun = _pieces(words)
    begins = [card for name, card in _names().words if begun and name[: len(begun)] == begun]
    return tuple(dict.fromkeys(begins))


def _series(words: Words) -> _Found:
    """The cards of a series: the one that has its name, and those whose names go on."""
    exact = _by_key(words) if words else _Found()
    return _Found(tuple(dict.fromkeys((*exact.cards, *_beginning(words)))), bool(exact.cards) and exact.whole)


def _by_key(words: Words) -> _Found:
    """The cards with this very name, or with an end of it."""
    names, key = _names(), "".join(words)
    if key in names.full:
        return _Found(names.full[key])
    if key in names.usual:
        return _usual(key)
    if key.isdecimal():
        return _by_number(key)
    if key in names.short:
        return _Found(names.short[key])
    bare = tuple(word for word in words if word not in _BRANDS - {"pro"})
    key = "".join(bare)
    if bare == words or (key.isdecimal() and "geforce" not in words):
        return _Found()
    return _by_number(key) if key.isdecimal() else _Found(names.short.get(key, ()))


def _usual(key: str) -> _Found:
    """The card that a short name means unless more is said."""
    card = _names().usual[key]
    others = [one.name for one in all_cards() if one.chip == card.chip and one != card]
    others = [name for name in others if "".join(_split(name)).startswith(key)]
    if not others:
        return _Found((card,))
    note = f"taken for {card.name}; for another, write {' or '.join(others)}"
    return _Found((card,), notes=(note,))


def _by_number(number: str) -> _Found:
    """The cards that are called by a number alone: `4090`, and `6800` of RX 6800 and W6800."""
    names = _names()
    lettered = [
        card for words, card in names.words if len(words) == 2 and len(words[0]) == 1 and words[1] == number
    ]
    exact = names.short.get(number, ())
    begun = [card for words, card in names.words if words[0] == number]
    return _Found(tuple(dict.fromkeys((*exact, *lettered, *(() if exact else begun)))), whole=bool(exact))


def _by_chip(words: Words) -> _Found:
    """The cards of the chip that a name has: all of them, or the one whose name stands beside it."""
    for chip_words, chip in _names().chips:
        size = len(chip_words)
        at = next((n for n in range(len(words)) if words[n : n + size] == chip_words), None)
        if at is None:
            continue
        of_chip = tuple(card for card in all_cards() if card.chip == chip)
        rest = words[:at] + words[at + size :]
        if not rest:
            return _Found(of_chip)
        beside = _by_key(rest)
        return _Found(tuple(card for card in beside.cards if card in of_chip), beside.whole, beside.notes)
    return _Found()


# ---- what is asked back --------------------------------------------------------------------------------


def cards_like(text: str) -> tuple[Card, ...]:
    """The cards, three at most, one of whose names differs from a text by few characters."""
    names = {"".join(words) for words in _Asked.read(text).names}
    close: dict[Card, float] = {}
    for key, cards in _names().short.items():
        alike = (difflib.SequenceMatcher(None, name, key) for name in names)
        score = max((m.ratio() for m in alike if m.real_quick_ratio() >= _ALIKE), default=0.0)
        for card in cards if score >= _ALIKE else ():
            close[card] = max(score, close.get(card, 0.0))
    return tuple(sorted(close, key=lambda card: -close[card])[:3])


def sizes_text(card: Card) -> str:
    """A card's sizes of memory: `16 or 32 GiB`."""
    if not card.memory_variants:
        return "the machine's own memory"
    return f"{' or '.join(str(size // GIB) for size in card.memory_variants)} GiB"


def _shown(cards: Sequence[Card]) -> str:
    names = [f"{card.name} ({card.target})" for card in cards[:_SHOWN]]
    return ", ".join(names) + (f" and {len(cards) - _SHOWN} more" if len(cards) > _SHOWN else "")


def _unknown(asked: _Asked) -> CardUnknown:
    otherwise = asked.named_otherwise()
    if otherwise and (asked.memory or asked.kind):
        has = "; ".join(f"{card.name} has {sizes_text(card)}" for card in otherwise[:_SHOWN])
        return CardUnknown(
            f"no card of our list is {asked.text!r}: {has}",
            "write the card's own size, or leave the size out",
        )
    close = " or ".join(f"{card.name} ({card.target})" for card in cards_like(asked.text))
    guess = f"did you mean {close}? Otherwise " if close else ""
    return CardUnknown(
        f"no card of our list is called {asked.text!r}",
        f"{guess}give its PCI id (lspci -nn shows it) or its target (rocminfo names it)",
    )


def _ambiguous(asked: _Asked, found: _Found) -> CardAmbiguous:
    if len(found.cards) == 1:
        return CardAmbiguous(
            f"{asked.text!r} isn't the name of one card alone",
            f"did you mean {_shown(found.cards)}?",
            found.cards,
        )
    return CardAmbiguous(
        f"{asked.text!r} names several cards: {_shown(found.cards)}",
        f"write more of the name, as in {found.cards[0].name!r}",
        found.cards,
    )

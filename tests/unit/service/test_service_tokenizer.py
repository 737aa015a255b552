"""WordPiece does what BERT's tokenizer does (expected ids are those of the reference implementation)."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.errors import ModelUnreadable
from service.model.tokenizer import STAND_IN, HashingStandIn, WordPiece, load_tokenizer, stand_in, words

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = ("profit", "##s", "rose", "un", "##aff", "##able", ",", "!", "naive", "中", "国", "a", "##a", "##b")
VOCABULARY = {token: number for number, token in enumerate(SPECIAL + PIECES)}
NAMES = {number: token for token, number in VOCABULARY.items()}


def pieces(text: str, *, max_tokens: int = 512, lower: bool = True) -> list[str]:
    return [NAMES[each] for each in WordPiece(VOCABULARY, lower).encode(text, max_tokens).ids[1:-1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Profits rose!", ["profit", "##s", "rose", "!"]),
        ("unaffable", ["un", "##aff", "##able"]),
        ("naïve,ROSE", ["naive", ",", "rose"]),
        ("中国rose", ["中", "国", "rose"]),
        ("ro\x00se\ufffd \u200bro\x0bse", ["rose", "rose"]),  # characters that vanish without a gap
        ("rose\u00a0rose\u2028rose\trose\r\nrose", ["rose"] * 5),
        ("zebra rose", ["[UNK]", "rose"]),
        ("profitz", ["[UNK]"]),  # one piece unknown: the whole word is
        ("a" * 100, ["a", *["##a"] * 99]),
        ("a" * 101, ["[UNK]"]),
        ("[SEP] rose", ["[UNK]", "[UNK]", "[UNK]", "rose"]),  # text, never a control token
    ],
)
def test_text_becomes_these_pieces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


def test_a_cased_vocabulary_keeps_case_and_accents() -> None:
    assert list(words("Naïve É", lower=False)) == ["Naïve", "É"]
    assert list(words("Naïve É", lower=True)) == ["naive", "e"]


@pytest.mark.parametrize("char", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¿\u2013“")
def test_punctuation_stands_alone(char: str) -> None:
    assert list(words(f"up{char}down", lower=True)) == ["up", char, "down"]


def test_a_long_text_is_cut_and_says_so() -> None:
    encoded = WordPiece(VOCABULARY).encode("rose " * 10, 6)
    assert encoded.truncated
    assert len(encoded.ids) == 6
    assert (NAMES[encoded.ids[0]], NAMES[encoded.ids[-1]]) == ("[CLS]", "[SEP]")
    exact = WordPiece(VOCABULARY).encode("rose " * 4, 6)
    assert (len(exact.ids), exact.truncated) == (6, False)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.integers(3, 40))
def test_any_text_gives_known_ids_within_the_limit(text: str, limit: int) -> None:
    for tokenizer, size in ((WordPiece(VOCABULARY), len(VOCABULARY)), (HashingStandIn(1200), 1200)):
        ids = tokenizer.encode(text, limit).ids
        assert 2 <= len(ids) <= limit
        assert all(0 <= each < size for each in ids)


def test_the_stand_in_is_deterministic_and_called_what_it_is() -> None:
    tokenizer = stand_in(30522)
    assert tokenizer.name == STAND_IN
    assert tokenizer.encode("Profits rose", 16).ids == tokenizer.encode("profits  ROSE", 16).ids
    assert tokenizer.encode("profits rose", 16).ids == (101, 17337, 26254, 102)


def test_a_vocabulary_too_small_to_hash_into_is_an_error() -> None:
    with pytest.raises(ModelUnreadable, match="too small"):
        stand_in(1000)


def write(directory: Path, tokens: tuple[str, ...], config: str = "") -> Path:
    (directory / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    if config:
        (directory / "tokenizer_config.json").write_text(config)
    return directory


def test_a_vocabulary_beside_the_model_is_used(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, SPECIAL + PIECES), 100)
    assert tokenizer.name == "wordpiece"
    assert tokenizer.encode("Profits", 8).ids == (2, 4, 5, 3)


def test_a_line_separator_inside_a_token_is_no_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, (*SPECIAL, "\u2028", "rose")), 100)
    assert tokenizer.encode("rose", 8).ids == (2, 5, 3)


def test_lower_casing_follows_the_tokenizers_config(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, SPECIAL + PIECES, '{"do_lower_case": false}'), 100)
    assert tokenizer.encode("Rose", 8).ids == (2, 1, 3)


def test_without_a_vocabulary_the_stand_in_answers(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, 30522).name == STAND_IN


@pytest.mark.parametrize(
    ("tokens", "config", "said"),
    [
        (("[PAD]", "[UNK]", "rose"), "", r"lacks \[CLS\], \[SEP\]"),
        (tuple(f"t{number}" for number in range(97)) + SPECIAL, "", "101 lines, but the model knows 100"),
        (SPECIAL, "{", "tokenizer_config.json can't be read"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_an_error(
    tmp_path: Path, tokens: tuple[str, ...], config: str, said: str
) -> None:
    with pytest.raises(ModelUnreadable, match=said):
        load_tokenizer(write(tmp_path, tokens, config), 100)


def test_a_vocabulary_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelUnreadable, match="can't be read"):
        load_tokenizer(tmp_path, 100)

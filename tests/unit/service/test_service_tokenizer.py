"""The tokenizer that is loaded does what BERT's does (expected ids are the reference implementation's)."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.errors import ModelUnreadable
from service.inference.tokenizer import (
    STAND_IN,
    LibraryTokenizer,
    Tokenizer,
    hashing_tokenizer,
    load_tokenizer,
)

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PIECES = ("profit", "##s", "rose", "un", "##aff", "##able", ",", "!", "naive", "中", "国", "a", "##a", "##b")
VOCABULARY = {token: number for number, token in enumerate(SPECIAL + PIECES)}
NAMES = {number: token for token, number in VOCABULARY.items()}


def write(directory: Path, tokens: tuple[str, ...], config: str = "") -> Path:
    (directory / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    if config:
        (directory / "tokenizer_config.json").write_text(config)
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Tokenizer]:
    """A tokenizer with VOCABULARY that cuts at so many tokens."""
    folder = write(tmp_path_factory.mktemp("model"), SPECIAL + PIECES)
    return cache(lambda max_tokens: load_tokenizer(folder, 100, max_tokens))


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
def test_text_becomes_these_pieces(made: Callable[[int], Tokenizer], text: str, expected: list[str]) -> None:
    assert [NAMES[each] for each in made(512).encode(text).ids[1:-1]] == expected


def test_a_cased_vocabulary_keeps_case_and_accents(tmp_path: Path) -> None:
    tokens = (*SPECIAL, "Naïve", "naive")
    cased = load_tokenizer(write(tmp_path, tokens, '{"do_lower_case": false}'), 100, 9)
    assert cased.encode("Naïve").ids == (2, 4, 3)
    assert load_tokenizer(write(tmp_path, tokens, "{}"), 100, 9).encode("Naïve").ids == (2, 5, 3)


@pytest.mark.parametrize("char", "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¿\u2013“")
def test_punctuation_stands_alone(tmp_path: Path, char: str) -> None:
    tokenizer = load_tokenizer(write(tmp_path, (*SPECIAL, "up", "down", char)), 100, 9)
    assert tokenizer.encode(f"up{char}down").ids == (2, 4, 6, 5, 3)


def test_a_long_text_is_cut_and_says_so(made: Callable[[int], Tokenizer]) -> None:
    encoded = made(6).encode("rose " * 10)
    assert encoded.truncated
    assert len(encoded.ids) == 6
    assert (NAMES[encoded.ids[0]], NAMES[encoded.ids[-1]]) == ("[CLS]", "[SEP]")
    exact = made(6).encode("rose " * 4)
    assert (len(exact.ids), exact.truncated) == (6, False)


def test_a_pair_is_framed_as_one_and_its_tokens_are_told_apart(made: Callable[[int], Tokenizer]) -> None:
    encoded = made(512).encode(("rose", "profits rose"))
    assert [NAMES[each] for each in encoded.ids] == [
        "[CLS]",
        "rose",
        "[SEP]",
        "profit",
        "##s",
        "rose",
        "[SEP]",
    ]
    assert encoded.types == (0, 0, 0, 1, 1, 1, 1)
    assert made(512).encode("rose").types == ()


def test_of_a_pair_that_is_too_long_the_longer_text_is_cut_first(made: Callable[[int], Tokenizer]) -> None:
    for tokenizer in (made(8), hashing_tokenizer(1200, 8)):
        encoded = tokenizer.encode(("rose", "rose " * 20))
        assert encoded.truncated
        assert encoded.types == (0, 0, 0, 1, 1, 1, 1, 1)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.integers(3, 40))
def test_any_text_gives_known_ids_within_the_limit(
    made: Callable[[int], Tokenizer], text: str, other: str, limit: int
) -> None:
    for tokenizer, size in ((made(limit), len(VOCABULARY)), (hashing_tokenizer(1200, limit), 1200)):
        for encoded in (tokenizer.encode(text), tokenizer.encode((text, other))):
            assert 2 <= len(encoded.ids) <= limit
            assert all(0 <= each < size for each in encoded.ids)
            assert len(encoded.types) in (0, len(encoded.ids))


def test_the_stand_in_is_deterministic_and_called_what_it_is() -> None:
    tokenizer = hashing_tokenizer(30522, 16)
    assert tokenizer.name == STAND_IN
    assert tokenizer.encode("Profits rose").ids == tokenizer.encode("profits  ROSE").ids
    assert tokenizer.encode("profits rose").ids == (101, 17337, 26254, 102)


def test_a_vocabulary_too_small_to_hash_into_is_an_error() -> None:
    with pytest.raises(ModelUnreadable, match="too small"):
        hashing_tokenizer(1000, 8)


def test_a_vocabulary_beside_the_model_is_used(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, SPECIAL + PIECES), 100, 8)
    assert tokenizer.name == "wordpiece"
    assert tokenizer.encode("Profits").ids == (2, 4, 5, 3)


def test_a_line_separator_inside_a_token_is_no_line(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, (*SPECIAL, "\u2028", "rose")), 100, 8)
    assert tokenizer.encode("rose").ids == (2, 5, 3)


def test_lower_casing_follows_the_tokenizers_config(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, SPECIAL + PIECES, '{"do_lower_case": false}'), 100, 8)
    assert tokenizer.encode("Rose").ids == (2, 1, 3)


def test_without_a_vocabulary_the_stand_in_answers(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, 30522, 8).name == STAND_IN


@pytest.mark.parametrize(
    ("tokens", "config", "said"),
    [
        (("[PAD]", "[UNK]", "rose"), "", r"lacks \[CLS\], \[SEP\]"),
        (tuple(f"t{number}" for number in range(97)) + SPECIAL, "", "101 ids, but the model knows 100"),
        (SPECIAL, "{", "tokenizer_config.json can't be read"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_an_error(
    tmp_path: Path, tokens: tuple[str, ...], config: str, said: str
) -> None:
    with pytest.raises(ModelUnreadable, match=said):
        load_tokenizer(write(tmp_path, tokens, config), 100, 8)


def test_a_vocabulary_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelUnreadable, match="can't be read"):
        load_tokenizer(tmp_path, 100, 8)


def whole(directory: Path, **changes: object) -> Path:
    """The same tokenizer as one tokenizer.json, as transformers saves it: with its special tokens added."""
    write(directory, SPECIAL + PIECES)
    plain = load_tokenizer(directory, 100, 512)
    plain.tokenizer.no_truncation()  # type: ignore[attr-defined]
    plain.tokenizer.add_special_tokens(list(SPECIAL))  # type: ignore[attr-defined]
    saved = json.loads(plain.tokenizer.to_str()) | changes  # type: ignore[attr-defined]
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    return directory


def test_a_tokenizer_json_is_taken_before_a_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(whole(tmp_path), 100, 5)
    assert tokenizer.name == "tokenizer.json"
    assert tokenizer.encode("Profits rose rose").ids == (2, 4, 5, 6, 3)
    assert tokenizer.encode("Profits rose rose").truncated


def test_a_special_token_in_a_text_is_text(tmp_path: Path) -> None:
    """A caller that could write [SEP] could frame sentences of its own."""
    tokenizer = load_tokenizer(whole(tmp_path), 100, 16)
    assert tokenizer.encode("rose [SEP] rose").ids == (2, 6, 1, 1, 1, 6, 3)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": {"type": "None"}}'])
def test_a_tokenizer_json_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelUnreadable, match=r"tokenizer\.json can't be read"):
        load_tokenizer(tmp_path, 100, 8)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
def test_a_tokenizer_whose_link_leads_nowhere_is_not_replaced_by_the_stand_in(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).symlink_to("../../blobs/0123")
    with pytest.raises(ModelUnreadable, match=f"{name} is not a regular file, but a link that leads nowhere"):
        load_tokenizer(tmp_path, 2000, 8)


def with_parts(**parts: Any) -> str:
    """A tokenizer.json that works but for `parts`."""
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "a": 3, "b": 4}
    plain: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": vocab},
    }
    return json.dumps(plain | parts)


PREFIXED = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "xxxx"}
PANICS = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    {"model": {"type": "BPE"} | PREFIXED},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
]
FAILS = [
    {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {}}},
    {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}},
]


@pytest.mark.thorough
@pytest.mark.parametrize("parts", [*PANICS, *FAILS])
def test_a_tokenizer_at_which_the_library_panics_is_unreadable(tmp_path: Path, parts: dict[str, Any]) -> None:
    """Its panics are no Exception: one of them ended the service when SIGHUP had the models loaded again."""
    (tmp_path / "tokenizer.json").write_text(with_parts(**parts))
    with pytest.raises(ModelUnreadable, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, 2000, 8)


def test_a_text_at_which_the_library_panics_is_that_texts_failure(tmp_path: Path) -> None:
    class Panic(BaseException):
        pass

    Panic.__name__ = "PanicException"

    class Panicking:
        def encode(self, *_texts: str) -> None:
            raise Panic("index out of bounds")

    with pytest.raises(RuntimeError, match="the tokenizer failed: index out of bounds"):
        LibraryTokenizer(Panicking(), "made").encode("a")  # type: ignore[arg-type]

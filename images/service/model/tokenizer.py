"""Text to BERT's token ids: WordPiece when there is a vocabulary, else a hashing stand-in, called so."""

import json
import unicodedata
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from service.errors import ModelUnreadable
from service.model.classifier import Encoded

MAX_WORD_CHARS = 100  # longer words become [UNK], as in BERT's reference tokenizer
STAND_IN = "hashing-stand-in"
_STAND_IN_FIRST = 1000  # BERT's uncased vocabulary keeps its special and unused tokens below this
_STAND_IN_CLS, _STAND_IN_SEP = 101, 102  # where that vocabulary has [CLS] and [SEP]

# Blocks written without spaces between words: every ideograph is a word (list of BERT's reference tokenizer)
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class Tokenizer(Protocol):
    """Turns one text into at most `max_tokens` ids, [CLS] and [SEP] included."""

    @property
    def name(self) -> str:
        """Its name in the responses."""
        ...

    def encode(self, text: str, max_tokens: int) -> Encoded:
        """The ids of `text`, cut at the end when it is too long."""
        ...


def words(text: str, *, lower: bool) -> Iterator[str]:
    """Words and single punctuation marks, cleaned; lower-cased and stripped of accents when `lower`."""
    for word in _clean(text).split():
        yield from _split_punctuation(_plain(word) if lower else word)


def _clean(text: str) -> str:
    kept: list[str] = []
    for char in text:
        if char in "\t\n\r":  # the only control characters that separate words; the others vanish
            kept.append(" ")
        elif char != "\ufffd" and not unicodedata.category(char).startswith("C"):
            kept.append(f" {char} " if _is_ideograph(char) else char)
    return "".join(kept)


def _is_ideograph(char: str) -> bool:
    code = ord(char)
    return code >= 0x3400 and any(low <= code <= high for low, high in _IDEOGRAPHS)


def _plain(word: str) -> str:
    lowered = word.lower()
    if lowered.isascii():
        return lowered
    decomposed = unicodedata.normalize("NFD", lowered)
    return "".join(char for char in decomposed if unicodedata.category(char) != "Mn")


def _is_punctuation(char: str) -> bool:
    if char.isascii():  # $, +, ~ and the like count too, though Unicode calls them symbols
        return char.isprintable() and not char.isalnum() and char != " "
    return unicodedata.category(char).startswith("P")


def _split_punctuation(word: str) -> Iterator[str]:
    start = 0
    for at, char in enumerate(word):
        if _is_punctuation(char):
            if at > start:
                yield word[start:at]
            yield char
            start = at + 1
    if start < len(word):
        yield word[start:]


def _framed(pieces: Iterator[int], max_tokens: int, *, first: int, last: int) -> Encoded:
    """[CLS] pieces [SEP]; reads no more of `pieces` than fits, so a long text costs little."""
    kept = tuple(islice(pieces, max_tokens - 2))
    return Encoded((first, *kept, last), truncated=next(pieces, None) is not None)


@dataclass(frozen=True)
class WordPiece:
    """BERT's tokenizer: greedy, longest match first, continuation pieces marked `##`.

    Text such as "[SEP]" is text here, never a control token: a caller can't frame sentences of its own.
    """

    vocabulary: Mapping[str, int]
    lower: bool = True
    name: str = "wordpiece"

    def encode(self, text: str, max_tokens: int) -> Encoded:
        """See `Tokenizer.encode`."""
        pieces = (piece for word in words(text, lower=self.lower) for piece in self._pieces(word))
        return _framed(pieces, max_tokens, first=self.vocabulary["[CLS]"], last=self.vocabulary["[SEP]"])

    def _pieces(self, word: str) -> list[int]:
        unknown = [self.vocabulary["[UNK]"]]
        if len(word) > MAX_WORD_CHARS:
            return unknown
        found: list[int] = []
        start = 0
        while start < len(word):
            end, piece = self._longest(word, start)
            if piece is None:
                return unknown
            found.append(piece)
            start = end
        return found

    def _longest(self, word: str, start: int) -> tuple[int, int | None]:
        mark = "##" if start else ""
        for end in range(len(word), start, -1):
            piece = self.vocabulary.get(mark + word[start:end])
            if piece is not None:
                return end, piece
        return start, None


@dataclass(frozen=True)
class HashingStandIn:
    """Gives every word the id of its checksum. Not a vocabulary: it only keeps a model without one busy."""

    vocab_size: int
    name: str = field(default=STAND_IN, init=False)

    def encode(self, text: str, max_tokens: int) -> Encoded:
        """See `Tokenizer.encode`."""
        span = self.vocab_size - _STAND_IN_FIRST
        pieces = (_STAND_IN_FIRST + zlib.crc32(word.encode()) % span for word in words(text, lower=True))
        return _framed(pieces, max_tokens, first=_STAND_IN_CLS, last=_STAND_IN_SEP)


def stand_in(vocab_size: int) -> HashingStandIn:
    """A stand-in for `vocab_size` ids. Raises ModelUnreadable when there are too few to hash into."""
    if vocab_size <= _STAND_IN_FIRST:
        raise ModelUnreadable(
            f"a vocabulary of {vocab_size} is too small to do without vocab.txt",
            "put the model's vocab.txt next to its config.json",
        )
    return HashingStandIn(vocab_size)


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """WordPiece from `directory`'s vocab.txt, or the stand-in when there is none.

    `do_lower_case` of tokenizer_config.json is honoured (true by default).
    Raises ModelUnreadable for a vocabulary that doesn't fit the model.
    """
    path = directory / "vocab.txt"
    if not path.is_file():
        return stand_in(vocab_size)
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnreadable(f"{path} can't be read: {error}") from error
    vocabulary = {line: number for number, line in enumerate(lines)}
    missing = [token for token in ("[CLS]", "[SEP]", "[UNK]", "[PAD]") if token not in vocabulary]
    if missing:
        raise ModelUnreadable(
            f"{path} lacks {', '.join(missing)}", "use the vocab.txt that came with the model"
        )
    if len(lines) > vocab_size:
        raise ModelUnreadable(
            f"{path} has {len(lines)} lines, but the model knows {vocab_size} ids",
            "use the vocab.txt that came with the model",
        )
    return WordPiece(vocabulary, lower=_lower_case(directory / "tokenizer_config.json"))


def _lower_case(path: Path) -> bool:
    if not path.is_file():
        return True
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path} can't be read: {error}") from error
    return bool(said.get("do_lower_case", True)) if isinstance(said, dict) else True

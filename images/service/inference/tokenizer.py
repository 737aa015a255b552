"""Text to token ids: the model's tokenizer, by the `tokenizers` library, or without one a hash of each word
(`"tokenizer": "hashing-stand-in"` in the answers).
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from service.errors import ModelUnreadable
from service.inference.checkpoint import is_file, read_text
from service.inference.classifier import Encoded, Text

MAX_WORD_CHARS = 100  # longer words become [UNK], as in BERT's reference tokenizer
STAND_IN = "hashing-stand-in"
_STAND_IN_FIRST = 1000  # BERT's uncased vocabulary keeps its special and unused tokens below this
_STAND_IN_CLS, _STAND_IN_SEP = 101, 102  # where that vocabulary has [CLS] and [SEP]
_SAMPLES = (
    "Profits rose by 3 % - unbelievably!",
    "ab",
    "",
)  # which every tokenizer must encode when it is loaded
_SPECIAL = ("[CLS]", "[SEP]", "[UNK]", "[PAD]")
_NORMALIZER = normalizers.BertNormalizer(lowercase=True)


class Tokenizer(Protocol):
    """Turns a text, or a pair of texts, into ids, [CLS] and [SEP] included.

    "[SEP]" in a text is text, never a control token, so that callers can't frame sentences of their own.
    """

    @property
    def name(self) -> str:
        """The tokenizer's name in the answers."""
        ...

    def encode(self, text: Text) -> Encoded:
        """Return the ids of `text`, cut at the end if it is too long (of a pair: the longer text first)."""
        ...


@contextmanager
def _panics_caught() -> Iterator[None]:
    """Turn a panic of the library into a RuntimeError: it is no Exception, and would end the service."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # PyO3 has no name to import it by
            raise
        raise RuntimeError(f"the tokenizer failed: {error}") from error


@dataclass(frozen=True)
class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library."""

    tokenizer: tokenizers.Tokenizer
    name: str

    def encode(self, text: Text) -> Encoded:
        """See `Tokenizer.encode`."""
        with _panics_caught():
            encoding = self.tokenizer.encode(*([text] if isinstance(text, str) else text))
        types = tuple(encoding.type_ids) if any(encoding.type_ids) else ()
        return Encoded(tuple(encoding.ids), bool(encoding.overflowing), types)


@dataclass(frozen=True)
class HashingTokenizer:
    """Gives every word an id by its checksum, for a model without a vocabulary: the answers mean nothing."""

    vocab_size: int
    max_tokens: int
    name: str = field(default=STAND_IN, init=False)

    def encode(self, text: Text) -> Encoded:
        """See `Tokenizer.encode`."""
        if isinstance(text, str):
            ids = self._ids(text)
            kept = ids[: self.max_tokens - 2]
            return Encoded((_STAND_IN_CLS, *kept, _STAND_IN_SEP), len(kept) < len(ids))
        first, second = map(self._ids, text)
        room = max(0, self.max_tokens - 3)
        n_first = min(len(first), max(room - len(second), (room + 1) // 2))
        n_second = min(len(second), room - n_first)
        ids = [_STAND_IN_CLS, *first[:n_first], _STAND_IN_SEP, *second[:n_second], _STAND_IN_SEP]
        types = (*[0] * (n_first + 2), *[1] * (n_second + 1))
        return Encoded(tuple(ids), n_first + n_second < len(first) + len(second), types)

    def _ids(self, text: str) -> list[int]:
        words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(_NORMALIZER.normalize_str(text))
        span = self.vocab_size - _STAND_IN_FIRST
        return [_STAND_IN_FIRST + zlib.crc32(word.encode()) % span for word, _ in words]


def hashing_tokenizer(vocab_size: int, max_tokens: int) -> HashingTokenizer:
    """Return a HashingTokenizer for `vocab_size` ids. Raises ModelUnreadable if there are too few."""
    if vocab_size <= _STAND_IN_FIRST:
        raise ModelUnreadable(
            f"a vocabulary of {vocab_size} is too small to do without vocab.txt",
            "put the model's vocab.txt or tokenizer.json next to its config.json",
        )
    return HashingTokenizer(vocab_size, max_tokens)


def load_tokenizer(directory: Path, vocab_size: int, max_tokens: int) -> Tokenizer:
    """Return the tokenizer of `directory`'s tokenizer.json, else of its vocab.txt, else a HashingTokenizer.

    Raises ModelUnreadable for a tokenizer that can't be read or doesn't fit the model.
    """
    json_path, vocabulary_path = directory / "tokenizer.json", directory / "vocab.txt"
    if is_file(json_path):
        tokenizer, path, name = _from_json(json_path), json_path, "tokenizer.json"
    elif is_file(vocabulary_path):
        tokenizer, path, name = _from_vocabulary(vocabulary_path), vocabulary_path, "wordpiece"
    else:
        return hashing_tokenizer(vocab_size, max_tokens)
    n_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if n_ids > vocab_size:
        raise ModelUnreadable(
            f"{path} has {n_ids} ids, but the model knows {vocab_size}",
            f"use the {path.name} that came with the model",
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    tokenizer.encode_special_tokens = True
    library = LibraryTokenizer(tokenizer, name)
    try:
        for text in _SAMPLES:
            library.encode(text)
    except Exception as error:  # the library raises plain Exceptions
        raise ModelUnreadable(
            f"{path} can't turn a text into ids: {error}", f"use the {path.name} that came with the model"
        ) from error
    return library


def _from_json(path: Path) -> tokenizers.Tokenizer:
    try:
        with _panics_caught():
            return tokenizers.Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ModelUnreadable(f"{path} can't be read: {error}") from error


def _from_vocabulary(path: Path) -> tokenizers.Tokenizer:
    """Return BERT's WordPiece. `do_lower_case` of tokenizer_config.json is honoured (true by default)."""
    try:
        lines = read_text(path).removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelUnreadable(f"{path} can't be read: {error}") from error
    vocabulary = {line: number for number, line in enumerate(lines)}
    missing = [token for token in _SPECIAL if token not in vocabulary]
    if missing:
        raise ModelUnreadable(
            f"{path} lacks {', '.join(missing)}", "use the vocab.txt that came with the model"
        )
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS)
    )
    lower = _lower_case(path.with_name("tokenizer_config.json"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _lower_case(path: Path) -> bool:
    if not is_file(path):
        return True
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path} can't be read: {error}") from error
    return bool(config.get("do_lower_case", True)) if isinstance(config, dict) else True

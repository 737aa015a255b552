"""Text to token ids: the model's own tokenizer, else a hashing stand-in, called so."""

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
_TRIED = ("Profits rose by 3 % - unbelievably!", "ab", "")  # by every tokenizer before it is used
_SPECIAL = ("[CLS]", "[SEP]", "[UNK]", "[PAD]")


class Tokenizer(Protocol):
    """Turns a text, or a pair of texts, into ids, [CLS] and [SEP] included, cut where it is too long.

    Text such as "[SEP]" is text, never a control token: a caller can't frame sentences of its own.
    """

    @property
    def name(self) -> str:
        """Its name in the responses."""
        ...

    def encode(self, text: Text) -> Encoded:
        """The ids of `text`, cut at the end when it is too long (of a pair: the longer one first)."""
        ...


@contextmanager
def _panics_caught() -> Iterator[None]:
    """Raise RuntimeError for a panic of the library, which is no Exception and would end the service."""
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
            found = self.tokenizer.encode(*([text] if isinstance(text, str) else text))
        types = tuple(found.type_ids) if any(found.type_ids) else ()
        return Encoded(tuple(found.ids), bool(found.overflowing), types)


@dataclass(frozen=True)
class HashingTokenizer:
    """Gives every word the id of its checksum. Not a vocabulary: it only keeps a model without one busy."""

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
        words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(_NORMAL.normalize_str(text))
        span = self.vocab_size - _STAND_IN_FIRST
        return [_STAND_IN_FIRST + zlib.crc32(word.encode()) % span for word, _ in words]


_NORMAL = normalizers.BertNormalizer(lowercase=True)


def hashing_tokenizer(vocab_size: int, max_tokens: int) -> HashingTokenizer:
    """A stand-in for `vocab_size` ids. Raises ModelUnreadable when there are too few to hash into."""
    if vocab_size <= _STAND_IN_FIRST:
        raise ModelUnreadable(
            f"a vocabulary of {vocab_size} is too small to do without vocab.txt",
            "put the model's vocab.txt or tokenizer.json next to its config.json",
        )
    return HashingTokenizer(vocab_size, max_tokens)


def load_tokenizer(directory: Path, vocab_size: int, max_tokens: int) -> Tokenizer:
    """The tokenizer of `directory`'s tokenizer.json, else of its vocab.txt, else the stand-in.

    Raises ModelUnreadable for a tokenizer that can't be read or doesn't fit the model.
    """
    whole, vocabulary = directory / "tokenizer.json", directory / "vocab.txt"
    if is_file(whole):
        made, path, name = _from_json(whole), whole, "tokenizer.json"
    elif is_file(vocabulary):
        made, path, name = _from_vocabulary(vocabulary), vocabulary, "wordpiece"
    else:
        return hashing_tokenizer(vocab_size, max_tokens)
    n_ids = max(made.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if n_ids > vocab_size:
        raise ModelUnreadable(
            f"{path} has {n_ids} ids, but the model knows {vocab_size}",
            f"use the {path.name} that came with the model",
        )
    made.no_padding()
    made.enable_truncation(max_tokens)
    made.encode_special_tokens = True
    library = LibraryTokenizer(made, name)
    try:
        for text in _TRIED:
            library.encode(text)
    except Exception as error:  # as above
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
    """BERT's WordPiece. `do_lower_case` of tokenizer_config.json is honoured (true by default)."""
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
    made = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS)
    )
    lower = _lower_case(path.with_name("tokenizer_config.json"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return made


def _lower_case(path: Path) -> bool:
    if not is_file(path):
        return True
    try:
        said = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path} can't be read: {error}") from error
    return bool(said.get("do_lower_case", True)) if isinstance(said, dict) else True

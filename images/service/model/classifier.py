"""The vocabulary of the HTTP side and the torch side; the HTTP side works with any `Classifier`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ModelInfo:
    """The model. `weights` is 'random' or 'mounted'; `tokenizer` names what turns text into ids."""

    name: str
    weights: str
    weights_source: str
    tokenizer: str
    device: str
    device_description: str
    labels: tuple[str, ...]
    parameters: int
    vocab_size: int
    max_tokens: int


@dataclass(frozen=True)
class Encoded:
    """One text as token ids, [CLS] and [SEP] included; `truncated` when its tail didn't fit."""

    ids: tuple[int, ...]
    truncated: bool = False


Probabilities = tuple[float, ...]  # one per label, in the labels' order; their sum is 1


class Classifier(Protocol):
    """A loaded model. Both methods block and are called from one worker thread at a time."""

    @property
    def info(self) -> ModelInfo:
        """What answers."""
        ...

    def encode(self, texts: Sequence[str]) -> tuple[Encoded, ...]:
        """Token ids of each text."""
        ...

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        """Each row's probabilities. Raises RequestError (503) when the device has no memory left."""
        ...

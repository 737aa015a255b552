"""The vocabulary of the HTTP side and the torch side; the HTTP side works with any `Classifier`."""

from collections.abc import Mapping, Sequence
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
    hidden_size: int = 0
    dtype: str = "float32"
    accuracy: float | None = (
        None  # largest difference in probabilities from float32 on the CPU; None: it is that
    )


Text = str | tuple[str, str]  # one text, or a pair of texts that the model reads as one


@dataclass(frozen=True)
class Encoded:
    """One text as token ids, [CLS] and [SEP] included; `truncated` when its tail didn't fit.

    `types`: which text of a pair each token belongs to, 0 or 1; empty when all are 0.
    """

    ids: tuple[int, ...]
    truncated: bool = False
    types: tuple[int, ...] = ()


Vector = tuple[float, ...]
Probabilities = Vector  # one per label, in the labels' order; their sum is 1


class Classifier(Protocol):
    """A loaded model. All methods block; `classify`, `embed` and `prove` are called from one thread alone.

    Those three raise RequestError (503) when the device has no memory left, and DeviceFault when it fails.
    """

    @property
    def info(self) -> ModelInfo:
        """What answers."""
        ...

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        """Token ids of each text. Any thread may call it."""
        ...

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        """Each row's probabilities."""
        ...

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        """Each row's embedding: the mean of its tokens' last hidden states, of length 1."""
        ...

    def prove(self) -> None:
        """One small inference; DeviceFault unless it gives what it gave when the model was loaded."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes of memory by kind, as far as they are known. Any thread may call it."""
        ...

    def counts(self) -> Mapping[str, int]:
        """What has been counted since the model was loaded, by name. Any thread may call it."""
        ...

"""What the rest of the service sees of a model: the protocol `Classifier` and its values. Without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class ModelInfo:
    """Describes a model. `weights`: 'random', 'mounted' or 'hub'; `accuracy`: the largest difference of its
    probabilities from float32 on the CPU, on a few texts; None: it is that.
    """

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
    accuracy: float | None = None


Task = Literal["classify", "embed"]
Text = str | tuple[str, str]  # one text, or a pair of texts that the model reads as one


@dataclass(frozen=True)
class Encoded:
    """One text, or pair of texts, as token ids, [CLS] and [SEP] included.

    `truncated`: whether the text was cut. `types`: which text of a pair each token belongs to, 0 or 1; empty
    when all are 0.
    """

    ids: tuple[int, ...]
    truncated: bool = False
    types: tuple[int, ...] = ()


Vector = tuple[float, ...]
Probabilities = Vector  # one per label, in the labels' order; their sum is 1


class Classifier(Protocol):
    """A loaded model. Every method blocks.

    `classify`, `embed` and `prove` are called in one thread alone. They raise RequestError (503) when the
    device has no memory left, and DeviceFault when it fails.
    """

    @property
    def info(self) -> ModelInfo:
        """The model's description."""
        ...

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        """Return the token ids of each text. Any thread may call it."""
        ...

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        """Return each row's probabilities."""
        ...

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        """Return each row's embedding: the mean of its tokens' last hidden states, of length 1."""
        ...

    def prove(self) -> None:
        """Run the canary. Raises DeviceFault unless the result is that of the time of loading."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of memory by kind, as far as they are known. Any thread may call it."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Return the model's counters by name. Any thread may call it."""
        ...

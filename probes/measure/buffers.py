"""Buffers of torch by kind, as 64-bit words: pieces of them, the content expected there."""

from collections.abc import Iterator

import torch

from probes.measure.pattern import WORD_BYTES, Pattern, signed
from probes.measure.workbench import Kind
from probes.placement.runtime.storage.hostview import zero_copy

CHUNK_WORDS = 2**20  # compared at a time: 8 MiB of expected content, which fits even in a small container


class TorchSpan:
    """Pieces of a buffer, a row each: `seen` by operations, `home` where content is written and compared."""

    def __init__(
        self, seen: torch.Tensor, home: torch.Tensor, kind: Kind, *, first_word: int, stride_words: int
    ) -> None:
        self.seen, self.home, self.kind = seen, home, kind
        self.first_word, self.stride_words = first_word, stride_words

    @property
    def n_bytes(self) -> int:
        """Its length, of all pieces together."""
        return int(self.seen.numel()) * WORD_BYTES

    def against(self, pattern: Pattern) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of `home` of at most CHUNK_WORDS, each with the pattern's content there.

        That is one tensor, moved on from part to part: it can be read until the next part is asked for.
        """
        rows = self.home if self.home.dim() == 2 else self.home.unsqueeze(0)
        width = min(rows.shape[1], CHUNK_WORDS)
        height = max(CHUNK_WORDS // width, 1)
        content, at = rows[:0], 0
        for top in range(0, rows.shape[0], height):
            for left in range(0, rows.shape[1], width):
                part = rows[top : top + height, left : left + width]
                first = self.first_word + top * self.stride_words + left
                if content.shape == part.shape:
                    content.add_(signed(pattern.step * (first - at)))
                else:
                    content = _content(part, pattern, first_word=first, stride_words=self.stride_words)
                at = first
                yield part, content


class TorchMemory:
    """A buffer of one kind, as 64-bit words."""

    def __init__(self, kind: Kind, n_bytes: int, *, has_gpu: bool) -> None:
        self.kind, self.n_bytes = kind, n_bytes
        words = n_bytes // WORD_BYTES
        device = "cuda" if kind == "vram" and has_gpu else "cpu"
        pin = kind in ("pinned", "zero_copy") and has_gpu
        self._home = torch.empty(words, dtype=torch.int64, device=device, pin_memory=pin)
        self._seen = zero_copy(self._home) if kind == "zero_copy" and has_gpu else self._home

    def span(self, offset_bytes: int, n_bytes: int) -> TorchSpan:
        """A piece of it; both figures are multiples of 8."""
        first, end = offset_bytes // WORD_BYTES, (offset_bytes + n_bytes) // WORD_BYTES
        words = end - first
        return TorchSpan(
            self._seen[first:end], self._home[first:end], self.kind, first_word=first, stride_words=words
        )

    def spans(self, n_bytes: int, *, stride_bytes: int, count: int) -> TorchSpan:
        """The first `count` pieces of `n_bytes`, `stride_bytes` apart, from its beginning."""
        words, stride = n_bytes // WORD_BYTES, stride_bytes // WORD_BYTES
        seen, home = (t.as_strided((count, words), (stride, 1)) for t in (self._seen, self._home))
        return TorchSpan(seen, home, self.kind, first_word=0, stride_words=stride)

    def release(self) -> None:
        """Free the bytes, even if something still holds this object."""
        del self._home, self._seen


def _content(part: torch.Tensor, pattern: Pattern, *, first_word: int, stride_words: int) -> torch.Tensor:
    """The pattern's content in a part of rows `stride_words` apart that begins at `first_word`."""
    starts = torch.arange(part.shape[0], device=part.device).mul_(stride_words).add_(first_word)
    words = starts.unsqueeze(1) + torch.arange(part.shape[1], device=part.device)
    return words.mul_(signed(pattern.step)).add_(signed(pattern.start))

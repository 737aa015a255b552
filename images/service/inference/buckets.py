"""The batch shapes for which CUDA graphs are captured, and which of them a batch uses. Values only."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

# Steps of at most 2 in rows and 1.5 in tokens (from 32 on): a graph saves more time than its padding costs
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_TOKENS = 4096  # of one shape; a larger batch takes longer to compute than to launch


@dataclass(frozen=True, order=True)
class Bucket:
    """A captured shape: rows and tokens per row, padding included."""

    rows: int
    tokens: int

    @property
    def padded(self) -> int:
        """Tokens that the device computes, padding included."""
        return self.rows * self.tokens


def bucket_of(rows: int, tokens: int) -> Bucket | None:
    """Return the smallest shape that holds a batch, or None."""
    row, token = bisect_left(ROWS, rows), bisect_left(TOKENS, tokens)
    return Bucket(ROWS[row], TOKENS[token]) if row < len(ROWS) and token < len(TOKENS) else None


def smaller(bucket: Bucket) -> Bucket:
    """Return the next smaller shape (the first: itself). Every batch that uses `bucket` is larger than it."""
    row, token = ROWS.index(bucket.rows), TOKENS.index(bucket.tokens)
    return Bucket(ROWS[max(0, row - 1)], TOKENS[max(0, token - 1)])


def buckets(max_tokens: int, positions: int, max_batch_tokens: int) -> Iterator[Bucket]:
    """Yield every shape that a batch can use, the smallest first.

    `max_tokens`: of a row. `positions`: of the model. `max_batch_tokens`: of a batch; a single row may have
    more.
    """
    shapes = [Bucket(rows, tokens) for rows in ROWS for tokens in TOKENS]
    for bucket in sorted(shapes, key=lambda shape: (shape.padded, shape.rows)):
        below_tokens = TOKENS[TOKENS.index(bucket.tokens) - 1] if bucket.tokens > TOKENS[0] else 0
        below_rows = ROWS[ROWS.index(bucket.rows) - 1] if bucket.rows > 1 else 0
        least = (below_rows + 1) * (below_tokens + 1)  # tokens of the smallest batch that uses it
        reached = least <= max_batch_tokens or bucket.rows == 1
        if (
            bucket.padded <= MAX_TOKENS
            and below_tokens < max_tokens
            and bucket.tokens <= positions
            and reached
        ):
            yield bucket

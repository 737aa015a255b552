"""When requests are due: a Poisson process, regardless of what the server does. Pure."""

import random
from collections.abc import Iterator


def poisson(rate_per_s: float, *, seed: int) -> Iterator[float]:
    """Endless due times in seconds from the start, the same for a seed. Raises ValueError for rate <= 0."""
    if rate_per_s <= 0:
        raise ValueError(f"a rate of {rate_per_s} a second")
    gaps = random.Random(seed)
    at = 0.0
    while True:
        at += gaps.expovariate(rate_per_s)
        yield at

"""What the verbs' arguments have in common."""

import argparse

import pytest

from probes.arguments import whole


@pytest.mark.parametrize("text", ["0", "1000001", "0000001000999999", "-1", "1.5", "\u0663", ""])
def test_a_number_beyond_its_bounds_does_not_pass_by_its_first_digits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 1000000"):
        whole(1, 10**6)(text)


def test_bounds_themselves_are_taken() -> None:
    assert (whole(0, 5)("0"), whole(1, 10**6)("1000000")) == (0, 10**6)

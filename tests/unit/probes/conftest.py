"""The simulated machine needs no thousands of slots to show what the probes decide."""

import pytest

from probes.measure import transfer


@pytest.fixture(autouse=True)
def small_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MOST_SLOTS", 16)

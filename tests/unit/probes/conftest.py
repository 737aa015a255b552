"""Puts the simulated machine and the samples of reports, which are here, on the path of the tests below."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> "list[Figure]":
    """Those that were drawn."""
    from matplotlib.figure import Figure  # half a second, which few tests need

    from probes.reports import canvas

    made: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr(canvas, "Figure", Kept)
    return made

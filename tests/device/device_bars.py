"""The shape of the `bar` fixture."""

from typing import Protocol


class Bar(Protocol):
    def __call__(
        self,
        name: str,
        value: float,
        *,
        limit: float,
        unit: str = "",
        at_least: bool = False,
        **more: object,
    ) -> None:
        """Print the bar as a line of JSON, then hold it."""

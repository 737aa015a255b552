"""The shape of every error of both programs."""

from enum import IntEnum


class Failure(Exception):
    """A failure that a user can cause or meet. Never shown as a traceback.

    `message` says what happened to which thing, `hint` what to type next.
    """

    exit_code: IntEnum

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

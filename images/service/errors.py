"""Everything that can go wrong: what ends the process (with its exit code) and what ends a request."""

from enum import IntEnum

_MOST_CHARS = 1000  # of a message to a caller


class Exit(IntEnum):
    """Exit codes of `python3 -m service`; the numbers mean what they mean in buildtool."""

    OK = 0
    USAGE = 2  # an environment variable or the profile asks for something that isn't valid
    ENVIRONMENT = 3  # the torch build, the device or the port isn't there
    DATA = 5  # the mounted model can't be read


class ServiceError(Exception):
    """A reason not to start. The message says what and why, the hint what to do next."""

    exit_code: Exit = Exit.ENVIRONMENT

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class SettingsError(ServiceError):
    """An environment variable or a profile's key isn't valid."""

    exit_code = Exit.USAGE


class DeviceMissing(ServiceError):
    """The requested device isn't available with this torch build or in this container."""


class ModelUnreadable(ServiceError):
    """The mounted model directory doesn't hold a BERT sequence classifier."""

    exit_code = Exit.DATA


class HubUnreachable(ServiceError):
    """The hub doesn't give the model's files, and the cache doesn't have them."""


class DeviceLost(ServiceError):
    """The device failed while the service ran, and didn't recover: only a new process may help."""


class DeviceFault(Exception):
    """A computation failed as no request can make it fail: the driver or the device is at fault."""


class RequestError(Exception):
    """A request that isn't served: the HTTP status, why, and after how many seconds to try again."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        # A caller's own words may be in it, and JSON's escapes may write what UTF-8 can't
        self.message = message[:_MOST_CHARS].encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.status = status
        self.retry_after_s = retry_after_s


def bad_request(message: str) -> RequestError:
    """The caller's mistake: 400."""
    return RequestError(400, message)

"""All errors: a ServiceError ends the process with an exit code, a RequestError one request with a status."""

from enum import IntEnum

RETRY_AFTER_S = 1  # of a 503 or 429 where nothing is known about how long it will take
_MAX_MESSAGE_CHARS = 1000


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
    """The model's files are neither in the cache nor to be had from the hub."""


class DeviceLost(ServiceError):
    """The device failed while the service ran, and didn't recover: only a new process may help."""


class DeviceFault(Exception):
    """A computation failed in a way that no request can cause: the driver or the device is at fault."""


class RequestError(Exception):
    """A request that isn't served: the HTTP status, the message, and Retry-After in seconds."""

    def __init__(self, status: int, message: str, *, retry_after_s: int | None = None) -> None:
        # The message may quote the caller, whose JSON escapes may stand for what UTF-8 can't encode
        self.message = message[:_MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.status = status
        self.retry_after_s = retry_after_s


def bad_request(message: str) -> RequestError:
    """Return a RequestError for the caller's mistake (400)."""
    return RequestError(400, message)

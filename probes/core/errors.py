"""Everything that can go wrong while probing, with the exit code a script can rely on."""

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


class Exit(IntEnum):
    """Exit codes of `python3 -m probes`."""

    OK = 0
    REQUIRED = 1  # done, but it doesn't fit, or what --require asked for is missing
    USAGE = 2
    DEVICE = 3  # torch or the GPU is missing, unusable or in use by another run
    BROKEN = 4  # a probe, a trial or a run failed; the report holds what was measured
    DATA = 5  # a report can't be read or written
    NOT_EXECUTABLE = 126  # the command of `watch` can't be started
    NOT_FOUND = 127  # the command of `watch` isn't there
    INTERRUPTED = 130


class ProbeError(Failure):
    """A failure of the probes; its exit code says that a probe broke, unless a subclass has another."""

    exit_code: Exit = Exit.BROKEN


class UsageError(ProbeError):
    """The command line asks for something that isn't there."""

    exit_code = Exit.USAGE


class DeviceUnusable(ProbeError):
    """Torch or the GPU is missing, too small or not permitted."""

    exit_code = Exit.DEVICE


class LibraryMissing(DeviceUnusable):
    """A Python package that this verb needs isn't installed."""


class DeviceBusy(DeviceUnusable):
    """Another run holds the GPU: figures of two simultaneous runs would be worthless."""


class Unsupported(DeviceUnusable):
    """This torch or device can't do it; measurements that don't need it can go on."""


class ServerUnusable(DeviceUnusable):
    """A server that can't be reached, or doesn't answer what its protocol has."""


class OutOfMemory(DeviceUnusable):
    """An allocation was refused, by the driver or by a cap that the probe had set itself."""


class ModelFails(ProbeError):
    """A model whose pass raises an error of its own, such as for inputs of another shape."""


class ContentMismatch(ProbeError):
    """The bytes that arrived differ from those sent; their timings must not be kept."""


class ReportError(ProbeError):
    """A report that can't be read, written or trusted."""

    exit_code = Exit.DATA


class DoesNotFit(ProbeError):
    """A trial shows that a model doesn't fit."""

    exit_code = Exit.REQUIRED


class PlacementError(ProbeError):
    """A model can't be placed, or a placed model is used in a way that isn't supported."""

    exit_code = Exit.DEVICE


class PlanImpossible(PlacementError):
    """No placement fits the budget. The message names the smallest budget that works."""

    exit_code = Exit.REQUIRED


class CheckpointUnreadable(PlacementError):
    """A model's file that can't be read, or whose content contradicts itself."""

    exit_code = Exit.DATA

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint or "download or save the model again, or give another folder")


class ModelUnknown(PlacementError):
    """Nothing here says what such a model consists of. The hint says what to give instead."""

    exit_code = Exit.USAGE


class CommandMissing(ProbeError):
    """A command to watch isn't there or can't be started; the codes are those of shells."""

    def __init__(self, program: str, exit_code: Exit, reason: str = "") -> None:
        what = reason or ("no such program" if exit_code is Exit.NOT_FOUND else "it isn't executable")
        super().__init__(
            f"can't run {program or 'an empty name'}: {what}",
            "give the command after --: watch -- python train.py",
        )
        self.exit_code = exit_code

"""What can be wrong with a file that holds GPU code, and why a prune is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from buildtool.errors import ConfigError, DataError, Exit, ToolError


class BadTarget(ConfigError):
    """Text that doesn't name a GPU target."""


class GpuCodeError(DataError):
    """A file's GPU code can't be read. `place` is the byte offset in the file, when known."""

    def __init__(self, message: str, hint: str = "", *, place: int | None = None) -> None:
        where = f" (at byte {place:#x})" if place is not None else ""
        super().__init__(message + where, hint)
        self.place = place


class BadElf(GpuCodeError):
    """An ELF file contradicts itself or reaches past its end."""


class BadBundle(GpuCodeError):
    """A bundle of code objects contradicts itself, reaches past its end or fails its checksum."""


class PruneRefused(ToolError):
    """The file could be read, but cutting it might break it. The file is untouched."""


class TargetMissing(PruneRefused):
    """A prune would leave nothing for a target that was asked for."""

    exit_code = Exit.USAGE


class VerifyFailed(ToolError):
    """What was written isn't what was planned. The original is untouched."""


@contextmanager
def naming(thing: object) -> Iterator[None]:
    """Errors about GPU code say what is wrong, not in which file or image; callers that know it add it."""
    try:
        yield
    except (GpuCodeError, PruneRefused, VerifyFailed) as error:
        if str(thing) not in error.message:
            error.message = f"{thing}: {error.message}"
        raise

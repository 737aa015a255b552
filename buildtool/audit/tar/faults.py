"""Everything that can be wrong with an image's bytes.

Each fault names its place: member, layer, byte offset.
"""

from buildtool.errors import ConfigError, DataError
from probes.shared.quoting import terminal

_AGAIN = "it was cut short: save, copy or pull it again"


class ImageFault(DataError):
    """An image that can't be read or trusted. `place` says where in it."""

    def __init__(self, message: str, *, place: str, hint: str = "") -> None:
        super().__init__(terminal(f"{place}: {message}"), hint)
        self.place = place


class Truncated(ImageFault):
    """A stream ends before its announced end."""

    def __init__(self, message: str, *, place: str, hint: str = _AGAIN) -> None:
        super().__init__(message, place=place, hint=hint)


class MalformedTar(ImageFault):
    """A tar header or its extension that contradicts itself or the format."""


class MalformedStream(ImageFault):
    """Compressed data that doesn't decompress, or isn't what it is declared to be."""


class MalformedDocument(ImageFault):
    """A JSON document (index, manifest, config) that lacks a required part."""


class Mismatch(ImageFault):
    """Content whose digest or size isn't the announced one."""


class LimitExceeded(ImageFault):
    """More entries, metadata or bytes than any legitimate image has."""


class MissingContent(ImageFault):
    """A blob that a manifest names and the archive lacks."""


class NoSuchImage(ConfigError):
    """An archive without an image, or with several of which none was chosen."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(terminal(message), terminal(hint))

"""What can be wrong with an image's bytes, and the limits that its readers keep to.

Each error names its place: member, layer, byte offset.
"""

from dataclasses import dataclass

from buildtool.core.errors import ConfigError, DataError
from probes.core.quoting import terminal

_CUT_SHORT_HINT = "it was cut short: save, copy or pull it again"


class ImageError(DataError):
    """An image that can't be read or trusted. `place` says where in it."""

    def __init__(self, message: str, *, place: str, hint: str = "") -> None:
        super().__init__(terminal(f"{place}: {message}"), hint)
        self.place = place


class Truncated(ImageError):
    """A stream ends before its announced end."""

    def __init__(self, message: str, *, place: str, hint: str = _CUT_SHORT_HINT) -> None:
        super().__init__(message, place=place, hint=hint)


class MalformedTar(ImageError):
    """A tar header or its extension that contradicts itself or the format."""


class MalformedStream(ImageError):
    """Compressed data that doesn't decompress, or isn't what it is declared to be."""


class MalformedDocument(ImageError):
    """A JSON document (index, manifest, config) that lacks a required part."""


class Mismatch(ImageError):
    """Content whose digest or size isn't the announced one."""


class LimitExceeded(ImageError):
    """More entries, metadata or bytes than any legitimate image has."""


class MissingContent(ImageError):
    """A blob that a manifest names and the archive lacks."""


class NoSuchImage(ConfigError):
    """An archive without an image, or with several of which none was chosen."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(terminal(message), terminal(hint))


MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits for one image. The defaults are far above any image seen; each can be raised."""

    meta_bytes: int = MIB  # one PAX header, GNU long name or sparse map; Go's archive/tar has the same bound
    meta_depth: int = 1000  # extension headers before one entry; honest writers use at most three
    path_bytes: int = 4096  # PATH_MAX of Linux, including the final NUL
    index_bytes: int = 200 * MIB  # of memory for the index of all layers: some 600,000 entries
    document_bytes: int = 4 * MIB  # one JSON document; containers/image has the same bound
    documents_bytes: int = 32 * MIB  # all JSON documents of one archive
    captured_bytes: int = 128 * MIB  # package databases kept, compressed, while streaming; conda's are large
    captured_file_bytes: int = 16 * MIB
    unpacked_bytes: int = 1 << 38  # of all blobs together after decompression
    unpacked_ratio: int = 100  # times the archive's own bytes; honest layers have 2 to 20, text up to 50
    unpacked_free_bytes: int = 1 << 30  # at any ratio: legitimate layers may hold a file of zeros
    layer_free_bytes: int = 1 << 34  # of one layer at any ratio to its own bytes: some 15 s of reading
    window_log: int = 27  # zstd's own default bound for decoders: 128 MiB of window
    index_depth: int = 4  # indexes within indexes
    manifests: int = 1024  # of one index
    link_steps: int = 4_000_000  # names in targets of symbolic links that all paths together lead through
    layers: int = 512  # overlayfs stops at 128 in practice, containerd's importer doesn't


LIMITS = Limits()

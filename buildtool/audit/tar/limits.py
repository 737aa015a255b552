"""How much of anything an image may have before reading stops; these limits keep memory and time finite."""

from dataclasses import dataclass

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
    window_log: int = 27  # zstd's own default bound for decoders: 128 MiB of window
    index_depth: int = 4  # indexes within indexes
    manifests: int = 1024  # of one index
    link_steps: int = 4_000_000  # names in targets of symbolic links that all paths together lead through
    layers: int = 512  # overlayfs stops at 128 in practice, containerd's importer doesn't


LIMITS = Limits()

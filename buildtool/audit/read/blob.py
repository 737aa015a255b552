"""One blob of an image archive, read once: hashed, kept if it is JSON, indexed if it is a layer."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice

from buildtool.audit.read.layer import LayerIndex, index_layer
from buildtool.audit.tar.ahead import Ahead
from buildtool.audit.tar.faults import ImageFault
from buildtool.audit.tar.limits import LIMITS, Limits
from buildtool.audit.tar.tarwalk import TarReader
from buildtool.audit.tar.unpack import LAYERS, Allowance, Form, Meter, decompressed, peek, sniff

_SMALL_CHUNKS = 3  # a smaller layer isn't worth threads


@dataclass(frozen=True)
class Blob:
    """One blob after its only reading.

    `digest` and `stored_bytes` are of the blob as the archive stores it, `diff_id` and `tar_bytes`
    after decompression. A blob that looked like a layer and couldn't be read keeps its fault, since
    only a manifest can say whether it matters.
    """

    form: Form
    digest: str | None = None
    stored_bytes: int = 0
    document: bytes | None = None
    index: LayerIndex | None = None
    diff_id: str | None = None
    tar_bytes: int = 0
    fault: ImageFault | None = None


@dataclass(frozen=True)
class Bounds:
    """The limits of one blob:

    `room_bytes` of memory for its index, and a share of the archive's allowance.
    """

    limits: Limits = LIMITS
    room_bytes: int | None = None
    allowance: Allowance | None = None


def read_blob(chunks: Iterator[bytes], path: str, bounds: Bounds) -> Blob:
    """Read a blob once: hash it, keep it if it is JSON, index it if it is a layer."""
    meter = Meter()
    head, rest = peek(meter.through(chunks))
    form = sniff(head)
    blob = Blob(form)
    if form is Form.JSON:
        most = bounds.limits.document_bytes
        kept = [piece for piece in rest if meter.n_bytes <= most]
        blob = replace(blob, document=b"".join(kept) if meter.n_bytes <= most else None)
    elif form not in LAYERS:
        for _ in rest:
            pass
    else:
        try:
            blob = _read_layer(rest, blob, meter, path, bounds)
        except ImageFault as fault:
            return replace(blob, fault=fault)
    return replace(blob, digest=meter.digest, stored_bytes=meter.n_bytes)


def _read_layer(rest: Iterator[bytes], blob: Blob, meter: Meter, path: str, bounds: Bounds) -> Blob:
    limits = bounds.limits
    plain = meter if blob.form is Form.TAR else Meter()
    first = list(islice(rest, _SMALL_CHUNKS))
    pieces = decompressed(
        chain(first, rest), blob.form, place=path, limits=limits, allowance=bounds.allowance
    )
    # a thread each: read, hash and decompress; hash again. This thread walks the tar
    with ExitStack() as stages:
        if len(first) == _SMALL_CHUNKS:
            pieces = iter(stages.enter_context(Ahead(pieces)))
        if plain is not meter:
            pieces = plain.through(pieces)
            if len(first) == _SMALL_CHUNKS:
                pieces = iter(stages.enter_context(Ahead(pieces)))
        reader = TarReader(pieces, place=path, limits=limits)
        index = index_layer(reader, place=path, limits=limits, room_bytes=bounds.room_bytes)
    return replace(blob, index=index, diff_id=plain.digest, tar_bytes=plain.n_bytes)

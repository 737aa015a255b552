"""Images as the audit has read them, made without tars: files of any size take no memory."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buildtool.audit.counts import Facts, gather_facts
from buildtool.image.documents import ImageConfig, Platform, Step
from buildtool.image.layer import LayerIndex, split_path
from buildtool.image.reader import Attestations, ImageContents, Layer
from buildtool.image.tar import FILE, HARDLINK


@dataclass(frozen=True)
class A:
    """A file of a layer: its bytes, and what is inside it. With `link` it is a hard link."""

    size: int = 0
    content: bytes = b""  # files of equal content have equal bytes here
    code: Mapping[str, int] = field(default_factory=dict)
    debug: int = 0
    secrets: tuple[str, ...] = ()
    unread: str = ""
    link: str = ""
    database: str = ""  # the text of a package database


@dataclass(frozen=True)
class L:
    """A layer: its files, in any order, what it deletes, and what made it."""

    files: Mapping[str, A | int]
    gone: tuple[str, ...] = ()
    command: str | None = "RUN make"
    stored_bytes: int | None = 1000
    is_absent: bool = False  # its content isn't in the archive


def index_of(layer: L) -> LayerIndex:
    index = LayerIndex()
    for row, (path, given) in enumerate(layer.files.items()):
        one = given if isinstance(given, A) else A(given)
        directory, name = split_path(path.encode("utf-8", "surrogateescape"))
        index.dirs.append(directory)
        index.names.append(name)
        index.sizes.append(one.size)
        index.kinds.append(HARDLINK if one.link else FILE)
        told = (
            (index.links, one.link.encode()),
            (index.digests, one.content),
            (index.gpu_code, one.code),
            (index.debug, one.debug),
            (index.secrets, one.secrets),
            (index.unread, one.unread),
            (index.captured, one.database and zlib.compress(one.database.encode("utf-8", "surrogateescape"))),
        )
        for column, value in told:
            if value:
                column[row] = value  # type: ignore[index]
    index.whiteouts += [split_path(path.encode()) for path in layer.gone]
    return index


def contents(
    *layers: L,
    labels: Mapping[str, str] | None = None,
    env: tuple[str, ...] = (),
    history: Sequence[Step] | None = None,
    documents: tuple[bytes, ...] = (),
    ref: str = "weir/x:1",
) -> ImageContents:
    steps = tuple(history or (Step(layer.command or "", has_layer=True) for layer in layers))
    config = ImageConfig(
        Platform("linux", "amd64"), ("sha256:0",) * len(layers), None, labels or {}, env, "", steps
    )
    indexes = [None if layer.is_absent else index_of(layer) for layer in layers]
    rows = tuple(
        Layer(None, "sha256:0", layer.stored_bytes, 0, layer.command, index)
        for layer, index in zip(layers, indexes, strict=True)
    )
    return ImageContents(ref, None, None, "", config, rows, Attestations(documents=documents), ())


def facts(*layers: L, targets: tuple[str, ...] = (), top: int = 20, **image: object) -> Facts:
    return gather_facts(contents(*layers, **image), targets=targets, top=top)  # type: ignore[arg-type]


def debs(**lists: tuple[str, ...]) -> dict[str, A | int]:
    """dpkg's databases, which take no bytes of the layer; `_` replaces `-` in a package's name."""
    names = {key.replace("_", "-"): paths for key, paths in lists.items()}
    status = "".join(f"Package: {name}\nVersion: 1\n\n" for name in names)
    found: dict[str, A | int] = {"var/lib/dpkg/status": A(database=status)}
    for name, paths in names.items():
        found[f"var/lib/dpkg/info/{name}.list"] = A(database="".join(f"/{path}\n" for path in paths))
    return found

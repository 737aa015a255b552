"""What findings are judged by: each byte of an image with its owner, kind, layer and visibility."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from buildtool.audit.count.base import Base, find_base
from buildtool.audit.count.claims import (
    BUILD_ONLY,
    CUDA,
    DELETED,
    DUPLICATES,
    FOREIGN_CODE,
    FOREIGN_FILES,
    OF_KIND,
    OVERWRITTEN,
    STRIPPABLE,
    ClaimCounter,
    Claims,
    is_build_tool,
    is_tool_directory,
    parse_targets,
)
from buildtool.audit.count.copies import Duplicate, Maker, cause_of_rewriting, find_copies
from buildtool.audit.count.exposure import SecretPlace, exposed_secrets, exposed_values
from buildtool.audit.count.kinds import Classifier, Kind, Place
from buildtool.audit.count.largest import FileRow, largest_directories, largest_files
from buildtool.audit.count.packages import (
    UNOWNED,
    Manager,
    Ownership,
    Package,
    PackageRow,
    claim_leftovers,
    find_owners,
)
from buildtool.audit.count.spot import PackageName, Spot
from buildtool.audit.count.treemap import Tree, TreeCounter
from buildtool.audit.inspect.secrets import redacted
from buildtool.audit.read.contents import ImageContents
from buildtool.audit.read.layer import HASHED_BYTES, LayerIndex, join
from buildtool.audit.read.merge import Finder, Merged, merge

_CUDA_LIBRARY = re.compile(
    rb"^lib(cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cudart|cudss|nccl|nvrtc|nvJitLink|nvshmem"
    rb"|nvToolsExt|nvperf|(torch|c10)_(cuda|nvshmem)|caffe2_nvrtc)",
)
# libraries that are known to keep GPU code, or some of it, in sections that the audit doesn't read
_HIDES_CODE = re.compile(
    rb"^lib(cudnn|cufft|cusparseLt|cutensor|nvinfer|nvjpeg|npp)[^/]*\.so|(tensorflow|xla|pjrt|jax)[^/]*\.so"
)
_CUDA_DISTRIBUTION = re.compile(r"(nvidia[-_].*|(pytorch[-_])?triton|cuda[-_].*|cupy[-_]cuda.*)$")
_SERVICE = (b"app", b"srv", b"usr/src/app", b"opt/weir")
_TOP_DIRECTORIES = 200
_NO_PARTS: Mapping[tuple[Kind, str], int] = {}


@dataclass
class Tally:
    """Bytes of a group of files or parts of files, and where they are (anchor -> bytes)."""

    unpacked_bytes: int = 0
    places: Counter[Spot] = field(default_factory=Counter)

    def add(self, n_bytes: int, place: Spot) -> None:
        """One more file, or part of one."""
        self.unpacked_bytes += n_bytes
        self.places[place] += n_bytes

    def top(self, count: int) -> tuple[Spot, ...]:
        """The places with most bytes, largest first."""
        return tuple(place for place, _ in self.places.most_common(count))


def _tallies() -> "defaultdict[Any, Tally]":
    return defaultdict(Tally)


@dataclass(kw_only=True)
class Sums:
    """The sums of one pass over every file of every layer; accumulate. A target is that of GPU code."""

    owners: Counter[str] = field(default_factory=Counter)  # owner group -> bytes in all layers
    kinds: Counter[Kind] = field(default_factory=Counter)  # bytes in all layers; 0 for some
    shown: defaultdict[Kind, Tally] = field(default_factory=_tallies)  # visible, without what is strippable
    gpu_files: defaultdict[str, Tally] = field(default_factory=_tallies)  # visible, by their names' target
    gpu_in_libraries: defaultdict[str, Tally] = field(default_factory=_tallies)  # visible, by target
    cuttable: defaultdict[str, Tally] = field(default_factory=_tallies)  # of these, what a prune cuts
    unsearched: Tally = field(default_factory=Tally)  # visible: libraries with code where none is read
    strippable: Tally = field(default_factory=Tally)  # visible debug information in libraries and programs
    cuda: Tally = field(default_factory=Tally)  # visible: CUDA's distributions, and its libraries elsewhere
    overwritten: Tally = field(default_factory=Tally)  # path -> content that a later layer replaces
    rewritten: Counter[str] = field(default_factory=Counter)  # of these, by the same content: why -> bytes
    deleted: Tally = field(default_factory=Tally)
    build_only: Tally = field(default_factory=Tally)  # compilers, build systems and -dev packages
    visible_bytes: int = 0
    n_files: int = 0


@dataclass(kw_only=True)
class Facts(Sums):
    """An image, counted. Sums of `owners`, of `kinds` and of `layer_bytes` are equal."""

    labels: Mapping[str, str]  # without credentials, as are `commands`
    commands: tuple[str | None, ...]  # what made each layer
    ref: str
    wanted_targets: tuple[str, ...]
    layer_bytes: tuple[int, ...]
    layer_stored_bytes: tuple[int | None, ...]
    unread: tuple[tuple[bytes, str], ...]  # files that couldn't be inspected, and why
    duplicates: tuple[Duplicate, ...]
    secrets: tuple[SecretPlace, ...]
    claims: Claims
    packages: tuple[PackageRow, ...]
    top_files: tuple[FileRow, ...]
    top_directories: tuple[tuple[bytes, int], ...]  # with visible bytes of everything below
    tree: Tree
    dangling_links: int
    packages_left_out: int  # packages beyond the limit of kept ones
    base: Base


def gather(contents: ImageContents, *, targets: tuple[str, ...] = (), top: int = 20) -> Facts:
    """Count an image. `targets` are the GPUs it is meant for; the image's label is used when empty."""
    indexes = [layer.index or LayerIndex() for layer in contents.layers]
    merged = merge(indexes)
    ownership = find_owners(merged)
    claim_leftovers(merged, ownership)
    labels = contents.config.labels
    labelled = tuple(
        name.strip() for name in labels.get("io.weir.gpu-targets", "").split(",") if name.strip()
    )
    wanted = targets or labelled
    makers = [Maker.of(layer.command or "") for layer in contents.layers]
    copies = find_copies(merged, makers)
    base = find_base(contents.config)
    namer = _Namer(ownership, base.n_layers)
    count = _Count(merged, namer, copies.extra, makers, ClaimCounter(parse_targets(wanted)))
    for position in range(len(indexes)):
        count.layer(position)
    packages = count.packages()
    known = exposed_values(contents)
    return Facts(
        **vars(count.sums),
        labels={
            key: redacted(f"{key}={value}", known).removeprefix(f"{key}=") for key, value in labels.items()
        },
        commands=tuple(layer.command and redacted(layer.command, known) for layer in contents.layers),
        ref=contents.ref,
        wanted_targets=wanted,
        layer_bytes=tuple(layer.unpacked_bytes for layer in contents.layers),
        layer_stored_bytes=tuple(layer.stored_bytes for layer in contents.layers),
        unread=tuple((index.path(at), why) for index in indexes for at, why in index.unread.items()),
        duplicates=copies.duplicates,
        secrets=tuple(exposed_secrets(contents, merged)),
        claims=dict(count.claims.claims),
        packages=packages,
        top_files=largest_files(merged, top, lambda row: namer.of_row(merged, row)),
        top_directories=largest_directories(count.directories, min(top, _TOP_DIRECTORIES)),
        tree=count.tree.tree(namer.names),
        dangling_links=len(merged.dangling),
        packages_left_out=ownership.left_out,
        base=replace(base, name=redacted(base.name, known)),
    )


class _Namer:
    """Finds the owner of bytes: a package, else the base image they came with, else what the path implies."""

    def __init__(self, ownership: Ownership, base_layers: int) -> None:
        self.ownership = ownership
        self._base_layers = base_layers

    def names(self, owner: int, directory: bytes, layer: int) -> tuple[str, str]:
        """An owner's group and name; without a package the name is the group's."""
        if owner == UNOWNED:
            return (self.group(directory, layer),) * 2
        package = self.ownership.packages[owner]
        return package.manager.value, package.name

    def group(self, directory: bytes, layer: int) -> str:
        """The owner of files that no package owns."""
        if layer < self._base_layers:
            return "base image"
        served = any(directory == place or directory.startswith(place + b"/") for place in _SERVICE)
        return "service" if served else "unowned"

    def of_row(self, merged: Merged, row: int) -> str:
        """The name of a file's owner."""
        directory = merged.path(row).rpartition(b"/")[0]
        return self.names(self.ownership.owner[row], directory, merged.layer_of(row))[1]


class _Count:
    """The running sums of one pass over every file of every layer."""

    def __init__(
        self,
        merged: Merged,
        namer: _Namer,
        extra: frozenset[int],
        makers: Sequence[Maker],
        claims: ClaimCounter,
    ) -> None:
        ownership = namer.ownership
        self._merged, self._namer, self._ownership = merged, namer, ownership
        self._extra, self._makers, self.claims = extra, makers, claims
        self._finder = Finder(merged)
        self._classifier = Classifier()
        self.tree = TreeCounter(sum(sum(index.sizes) for index in merged.layers))
        self.sums = Sums()
        self.directories: Counter[bytes] = Counter()
        self._tools = [is_build_tool(package) for package in ownership.packages]
        self._cuda = [_cuda_place(package) for package in ownership.packages]
        n_packages = len(ownership.packages)
        self._all, self._visible, self._files = [0] * n_packages, [0] * n_packages, [0] * n_packages

    def layer(self, position: int) -> None:
        """Count one layer's files."""
        index, row = self._merged.layers[position], self._merged.starts[position] - 1
        owners, shown = self._ownership.owner, self._merged.shown
        for at, (directory, name, size) in enumerate(zip(index.dirs, index.names, index.sizes, strict=True)):
            row += 1
            if not size:
                continue
            owner = owners[row]
            place = self._classifier.place(directory, name)
            parts = _parts(index, at, place)
            rest = size - sum(parts.values()) if parts else size
            self.sums.kinds[place.kind] += rest
            for (kind, _), n_bytes in parts.items():
                self.sums.kinds[kind] += n_bytes
            self._all[owner] += size
            self.tree.add(
                directory,
                name,
                size,
                layer=position,
                owner=owner,
                kind=place.kind,
                targets=place.targets,
                parts=parts,
                shown=bool(shown[row]),
            )
            if owner == UNOWNED:
                self.sums.owners[self._namer.group(directory, position)] += size
            if not shown[row]:
                self._hidden(row, size)
                continue
            self._visible[owner] += size
            self._files[owner] += 1
            self.sums.n_files += 1
            self.sums.visible_bytes += size
            self.directories[directory] += size
            self.sums.shown[place.kind].add(rest, place.anchor)
            if place.targets:
                self.sums.gpu_files["+".join(place.targets)].add(size, place.anchor)
            causes = self._causes(row, owner, place, join(directory, name), size)
            self.claims.add(rest, causes)
            if parts:
                cut = self.claims.cut_from(index.gpu_code.get(at, {}), grain=index.grains.get(at, 0))
                self._shown_parts(parts, join(directory, name), causes, cut)
            if size >= HASHED_BYTES and _HIDES_CODE.search(name):
                self.sums.unsearched.add(size, join(directory, name))

    def _shown_parts(
        self, parts: Mapping[tuple[Kind, str], int], path: bytes, causes: list[str], cut: frozenset[str]
    ) -> None:
        """Visible bytes inside a file whose kind differs from the rest of it; a prune takes `cut` out."""
        for (kind, target), n_bytes in parts.items():
            if kind is Kind.DEBUG:
                self.sums.strippable.add(n_bytes, path.rpartition(b"/")[0])
                self.claims.add(n_bytes, [*causes, STRIPPABLE])
                continue
            self.sums.shown[kind].add(n_bytes, path)
            self.sums.gpu_in_libraries[target].add(n_bytes, path)
            if target in cut:
                self.sums.cuttable[target].add(n_bytes, path)
            self.claims.add(n_bytes, [*causes, FOREIGN_CODE] if target in cut else causes)

    def _causes(self, row: int, owner: int, place: Place, path: bytes, size: int) -> list[str]:
        """The findings that would remove a visible file; counts it for those that have their own tallies."""
        causes = [OF_KIND[place.kind]] if place.kind in OF_KIND else []
        cuda = self._cuda[owner] or (path if _CUDA_LIBRARY.match(path.rpartition(b"/")[2]) else b"")
        if cuda:
            self.sums.cuda.add(size, cuda)
            causes.append(CUDA)
        package = self._ownership.packages[owner]
        listed = owner != UNOWNED and package.manager is not Manager.ROCM
        if self._tools[owner] or (not listed and is_tool_directory(path)):
            self.sums.build_only.add(size, PackageName(package.name) if listed else place.anchor)
            causes.append(BUILD_ONLY)
        if row in self._extra:
            causes.append(DUPLICATES)
        if place.targets and self.claims.is_foreign("+".join(place.targets)):
            causes.append(FOREIGN_FILES)
        return causes

    def packages(self) -> tuple[PackageRow, ...]:
        """Every package with its bytes, largest first; adds the managers' sums to the groups."""
        rows = []
        for number, package in enumerate(self._ownership.packages):
            if number == UNOWNED:
                continue
            bytes_of = self._all[number], self._visible[number], self._files[number]
            rows.append(
                PackageRow(package.manager.value, package.name, package.version, package.place, *bytes_of)
            )
            self.sums.owners[package.manager.value] += self._all[number]
        return tuple(sorted(rows, key=lambda row: (-row.unpacked_bytes, row.name, row.place)))

    def _hidden(self, row: int, size: int) -> None:
        path = self._merged.path(row)
        above = self._finder.row(path)
        if above is None:
            self.sums.deleted.add(size, path)
            self.claims.add(size, [DELETED])
            return
        self.sums.overwritten.add(size, path)
        self.claims.add(size, [OVERWRITTEN])
        if self._merged.digest(row) is not None and self._merged.digest(row) == self._merged.digest(above):
            maker = self._makers[self._merged.layer_of(above)]
            self.sums.rewritten[cause_of_rewriting(self._merged, maker, above)] += size


def _cuda_place(package: Package) -> bytes:
    """How CUDA's own distributions are named in a finding; empty for all other packages."""
    by_pip = package.manager in (Manager.PYTHON, Manager.CONDA)
    if not (by_pip and _CUDA_DISTRIBUTION.match(package.name.lower())):
        return b""
    return f"{package.place}/{package.name} {package.version}".encode()


def _parts(index: LayerIndex, at: int, place: Place) -> Mapping[tuple[Kind, str], int]:
    """Content inside a file whose kind differs from the rest of it, by kind and GPU target."""
    code, debug = index.gpu_code.get(at), index.debug.get(at)
    if not (code or debug) or place.targets:
        return _NO_PARTS
    parts = {(Kind.GPU_CODE, target): n_bytes for target, n_bytes in (code or {}).items()}
    if debug and place.kind is not Kind.DEBUG:
        parts[Kind.DEBUG, ""] = debug
    return parts

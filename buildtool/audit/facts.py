"""What findings are judged by: each byte of an image with its owner, kind, layer and visibility."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from buildtool.audit.claims import (
    BUILD_ONLY,
    CUDA,
    DELETED,
    DUPLICATES,
    FOREIGN_FILES,
    OF_KIND,
    OVERWRITTEN,
    ClaimCounter,
    Claims,
    is_build_tool,
    is_tool_directory,
    parse_targets,
)
from buildtool.audit.contents import ImageContents
from buildtool.audit.copies import Duplicate, cause_of_rewriting, find_copies
from buildtool.audit.exposure import SecretPlace, exposed_secrets
from buildtool.audit.kinds import Classifier, Kind, Place
from buildtool.audit.layer import LayerIndex, join
from buildtool.audit.merge import Finder, Merged, merge
from buildtool.audit.packages import UNOWNED, Manager, Ownership, Package, claim_leftovers, find_owners
from buildtool.audit.secrets import redacted
from buildtool.audit.shown import show_text
from buildtool.audit.tree import Tree, TreeCounter

_CUDA_LIBRARY = re.compile(
    rb"^lib(cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cudart|cudss|nccl|nvrtc|nvJitLink|nvshmem"
    rb"|nvToolsExt|nvperf|torch_cuda|c10_cuda|caffe2_nvrtc)",
)
_CUDA_DISTRIBUTION = re.compile(r"(nvidia[-_].*|(pytorch[-_])?triton|cuda[-_].*|cupy[-_]cuda.*)$")
_SERVICE = (b"app", b"srv", b"usr/src/app", b"opt/weir")


@dataclass
class Tally:
    """Bytes of a group of files or parts of files, and where they are (anchor -> bytes)."""

    unpacked_bytes: int = 0
    places: Counter[bytes] = field(default_factory=Counter)

    def add(self, n_bytes: int, place: bytes) -> None:
        """One more file, or part of one."""
        self.unpacked_bytes += n_bytes
        self.places[place] += n_bytes

    def top(self, count: int = 20) -> tuple[bytes, ...]:
        """The places with most bytes, largest first."""
        return tuple(place for place, _ in self.places.most_common(count))


@dataclass(frozen=True)
class TopFile:
    """One of the largest visible files."""

    path: bytes
    unpacked_bytes: int
    layer: int
    owner: str


@dataclass(frozen=True)
class PackageBytes:
    """A package and the bytes of its files: in all layers, and of these what is visible at last."""

    manager: Manager
    name: str
    version: str
    place: str
    unpacked_bytes: int
    visible_bytes: int
    n_files: int


@dataclass(frozen=True)
class Facts:
    """An image, counted. Sums of `owners`, of `kinds` and of `layer_bytes` are equal."""

    labels: Mapping[str, str]
    ref: str
    wanted_targets: tuple[str, ...]
    layer_bytes: tuple[int, ...]
    layer_stored_bytes: tuple[int | None, ...]
    visible_bytes: int
    n_files: int
    owners: Mapping[str, int]  # owner group -> bytes in all layers
    kinds: Mapping[Kind, int]  # bytes in all layers
    shown: Mapping[Kind, Tally]  # the visible part
    gpu_files: Mapping[str, Tally]  # target -> visible files of GPU code, by name
    gpu_in_libraries: Mapping[str, Tally]  # target -> visible GPU code inside libraries
    unread: tuple[tuple[bytes, str], ...]  # files that couldn't be looked into, and why
    cuda: Tally  # visible files of CUDA's distributions, and CUDA's libraries elsewhere
    overwritten: Tally  # path -> content that a later layer replaces
    rewritten: Mapping[str, int]  # of these, replaced by the same content: why -> bytes
    deleted: Tally
    duplicates: tuple[Duplicate, ...]
    build_only: Tally  # compilers, build systems and -dev packages
    secrets: tuple[SecretPlace, ...]
    claims: Claims
    packages: tuple[PackageBytes, ...]
    top_files: tuple[TopFile, ...]
    top_directories: tuple[tuple[bytes, int], ...]  # with visible bytes of everything below
    tree: Tree
    dangling_links: int


def gather(contents: ImageContents, *, targets: tuple[str, ...] = (), top: int = 20) -> Facts:
    """Count an image. `targets` are the GPUs it is meant for; the image's label speaks when empty."""
    indexes = [layer.index or LayerIndex() for layer in contents.layers]
    merged = merge(indexes)
    ownership = find_owners(merged)
    claim_leftovers(merged, ownership)
    labels = {show_text(key): show_text(value) for key, value in contents.config.labels.items()}
    told = tuple(name.strip() for name in labels.get("io.weir.gpu-targets", "").split(",") if name.strip())
    wanted = targets or told
    commands = [layer.command or "" for layer in contents.layers]
    copies = find_copies(merged, commands)
    count = _Count(merged, ownership, copies.extra, commands, ClaimCounter(parse_targets(wanted)))
    for position in range(len(indexes)):
        count.layer(position)
    packages = count.packages()
    return Facts(
        labels={key: redacted(f"{key}={value}").removeprefix(f"{key}=") for key, value in labels.items()},
        ref=show_text(contents.ref),
        wanted_targets=wanted,
        layer_bytes=tuple(layer.unpacked_bytes for layer in contents.layers),
        layer_stored_bytes=tuple(layer.stored_bytes for layer in contents.layers),
        visible_bytes=sum(tally.unpacked_bytes for tally in count.shown.values()),
        n_files=count.n_files,
        owners=dict(count.groups),
        kinds={kind: n_bytes for kind, n_bytes in count.kinds.items() if n_bytes},
        shown=count.shown,
        gpu_files=count.gpu_files,
        gpu_in_libraries=count.gpu_in_libraries,
        unread=tuple((index.path(at), why) for index in indexes for at, why in index.unread.items()),
        cuda=count.cuda,
        overwritten=count.overwritten,
        rewritten=dict(count.rewritten),
        deleted=count.deleted,
        duplicates=copies.duplicates,
        build_only=count.build_only,
        secrets=tuple(exposed_secrets(contents, merged)),
        claims=dict(count.claims.claims),
        packages=packages,
        top_files=tuple(_top_file(merged, ownership, row) for row in _largest(merged, top)),
        top_directories=_top_directories(count.directories, top),
        tree=count.tree.tree(lambda owner, directory: _owner_names(ownership, owner, directory)),
        dangling_links=len(merged.dangling),
    )


class _Count:
    """The running sums of one pass over every file of every layer."""

    def __init__(
        self,
        merged: Merged,
        ownership: Ownership,
        extra: frozenset[int],
        commands: Sequence[str],
        claims: ClaimCounter,
    ) -> None:
        self._merged, self._ownership = merged, ownership
        self._extra, self._commands, self.claims = extra, commands, claims
        self._finder = Finder(merged)
        self._classifier = Classifier()
        self.tree = TreeCounter(sum(sum(index.sizes) for index in merged.layers))
        self.groups: Counter[str] = Counter()
        self.kinds: Counter[Kind] = Counter()
        self.shown: defaultdict[Kind, Tally] = defaultdict(Tally)
        self.gpu_files: defaultdict[str, Tally] = defaultdict(Tally)
        self.gpu_in_libraries: defaultdict[str, Tally] = defaultdict(Tally)
        self.directories: Counter[bytes] = Counter()
        self.cuda, self.overwritten, self.deleted, self.build_only = Tally(), Tally(), Tally(), Tally()
        self.rewritten: Counter[str] = Counter()
        self.n_files = 0
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
            code = None if place.targets else index.gpu_code.get(at)
            code_bytes = sum(code.values()) if code else 0
            self.kinds[place.kind] += size - code_bytes
            self.kinds[Kind.GPU_CODE] += code_bytes
            self._all[owner] += size
            self.tree.add(
                directory,
                name,
                size,
                layer=position,
                owner=owner,
                kind=place.kind,
                targets=place.targets,
                code=code,
                shown=bool(shown[row]),
            )
            if owner == UNOWNED:
                self.groups[_unowned_group(directory)] += size
            if not shown[row]:
                self._hidden(row, size)
                continue
            self._visible[owner] += size
            self._files[owner] += 1
            self.n_files += 1
            self.directories[directory] += size
            self.shown[place.kind].add(size - code_bytes, place.anchor)
            if place.targets:
                self.gpu_files["+".join(place.targets)].add(size, place.anchor)
            for target, n_bytes in (code or {}).items():
                self.shown[Kind.GPU_CODE].add(n_bytes, join(directory, name))
                self.gpu_in_libraries[target].add(n_bytes, join(directory, name))
            causes = self._causes(row, owner, place, join(directory, name), size)
            self.claims.add(size - code_bytes, causes)
            self.claims.add_code(code or {}, causes)

    def _causes(self, row: int, owner: int, place: Place, path: bytes, size: int) -> list[str]:
        """The findings that want a visible file gone; counts it for those that have tallies of their own."""
        causes = [OF_KIND[place.kind]] if place.kind in OF_KIND else []
        cuda = self._cuda[owner] or (path if _CUDA_LIBRARY.match(path.rpartition(b"/")[2]) else b"")
        if cuda:
            self.cuda.add(size, cuda)
            causes.append(CUDA)
        if self._tools[owner] or (owner == UNOWNED and is_tool_directory(path)):
            package = self._ownership.packages[owner]
            self.build_only.add(size, package.name.encode("utf-8", "replace") or place.anchor)
            causes.append(BUILD_ONLY)
        if row in self._extra:
            causes.append(DUPLICATES)
        if place.targets and self.claims.is_foreign("+".join(place.targets)):
            causes.append(FOREIGN_FILES)
        return causes

    def packages(self) -> tuple[PackageBytes, ...]:
        """Every package with its bytes, largest first; adds the managers' sums to the groups."""
        rows = []
        for number, package in enumerate(self._ownership.packages):
            if number == UNOWNED:
                continue
            bytes_of = self._all[number], self._visible[number], self._files[number]
            rows.append(
                PackageBytes(package.manager, package.name, package.version, package.place, *bytes_of)
            )
            self.groups[package.manager.value] += self._all[number]
        return tuple(sorted(rows, key=lambda row: (-row.unpacked_bytes, row.name, row.place)))

    def _hidden(self, row: int, size: int) -> None:
        path = self._merged.path(row)
        above = self._finder.row(path)
        if above is None:
            self.deleted.add(size, path)
            self.claims.add(size, [DELETED])
            return
        self.overwritten.add(size, path)
        self.claims.add(size, [OVERWRITTEN])
        if self._merged.digest(row) is not None and self._merged.digest(row) == self._merged.digest(above):
            command = self._commands[self._merged.layer_of(above)]
            self.rewritten[cause_of_rewriting(self._merged, command, above)] += size


def _cuda_place(package: Package) -> bytes:
    """How CUDA's own distributions are named in a finding; empty for all other packages."""
    if package.manager is Manager.DEB or not _CUDA_DISTRIBUTION.match(package.name.lower()):
        return b""
    return f"{package.place}/{package.name} {package.version}".encode("utf-8", "surrogateescape")


def _unowned_group(directory: bytes) -> str:
    if directory.startswith(b"opt/rocm"):
        return "rocm tree"
    if any(directory == place or directory.startswith(place + b"/") for place in _SERVICE):
        return "service"
    return "unowned"


def _owner_names(ownership: Ownership, owner: int, directory: bytes) -> tuple[str, str]:
    """An owner's group and name; what nobody owns is named by its group."""
    if owner == UNOWNED:
        return (_unowned_group(directory),) * 2
    package = ownership.packages[owner]
    return package.manager.value, package.name


def _largest(merged: Merged, count: int) -> Sequence[int]:
    best: list[tuple[int, int]] = []
    for index, start in zip(merged.layers, merged.starts, strict=True):
        rows = (
            (size, start + at) for at, size in enumerate(index.sizes) if size and merged.shown[start + at]
        )
        best = nlargest(count, [*best, *nlargest(count, rows)])
    return [row for _, row in best]


def _top_file(merged: Merged, ownership: Ownership, row: int) -> TopFile:
    owner = ownership.owner[row]
    path = merged.path(row)
    _, told = _owner_names(ownership, owner, path.rpartition(b"/")[0])
    return TopFile(path, merged.size(row), merged.layer_of(row), told)


def _top_directories(own: Mapping[bytes, int], count: int) -> tuple[tuple[bytes, int], ...]:
    """The largest directories, leaving out those that a single child fills to nine tenths."""
    below: Counter[bytes] = Counter()
    for directory, n_bytes in own.items():
        below[directory] += n_bytes
        above = directory
        while above:
            above = above.rpartition(b"/")[0]
            below[above] += n_bytes
    fullest: Counter[bytes] = Counter()
    for directory, n_bytes in below.items():
        if directory:
            parent = directory.rpartition(b"/")[0]
            fullest[parent] = max(fullest[parent], n_bytes)
    telling = ((path, n) for path, n in below.items() if path and fullest[path] < 0.9 * n)
    return tuple(nlargest(count, telling, key=lambda row: (row[1], row[0])))

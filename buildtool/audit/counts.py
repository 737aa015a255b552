"""Every byte of an image with its owner, kind, layer and visibility: what findings are made from."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from buildtool.audit.claims import (
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
    LibraryCode,
    targets_if_valid,
)
from buildtool.audit.kinds import (
    Classification,
    Classifier,
    Kind,
    Location,
    PackageName,
    is_build_tool,
    is_tool_directory,
)
from buildtool.audit.packages import (
    UNOWNED,
    Manager,
    Ownership,
    Package,
    PackageRow,
    assign_unlisted_files,
    find_owners,
)
from buildtool.audit.treemap import FileRow, Tree, TreeCounter, largest_directories, largest_files
from buildtool.image.documents import ImageConfig
from buildtool.image.layer import LayerIndex, join_path
from buildtool.image.merge import Finder, Merged, merge
from buildtool.image.reader import ImageContents
from buildtool.image.secrets import (
    credentials_in_document,
    credentials_in_text,
    redacted,
)
from buildtool.keep.imports import source_of
from buildtool.keep.keep_list import KeepList
from probes.core.quoting import terminal

# What is counted.

_OWNERSHIP = re.compile(r"\bch(own|mod|grp)\b(?!=)")  # not COPY --chown=
_COPY = re.compile(r"(^|\s)(COPY|ADD)\s")


@dataclass(frozen=True)
class LayerCommand:
    """What the command that made a layer may have done; computed once per layer, as commands may be long."""

    changes_owners: bool
    copies: bool

    @classmethod
    def of(cls, command: str) -> "LayerCommand":
        """From the command's text, which is empty where the history doesn't record it."""
        return cls(bool(_OWNERSHIP.search(command)), bool(_COPY.search(command)))


def _tallies() -> "defaultdict[Any, Tally]":
    return defaultdict(Tally)


@dataclass
class Tally:
    """Bytes of a group of files or parts of files, and where they are (anchor -> bytes)."""

    unpacked_bytes: int = 0
    places: Counter[Location] = field(default_factory=Counter)

    def add(self, n_bytes: int, place: Location) -> None:
        """One more file, or part of one."""
        self.unpacked_bytes += n_bytes
        self.places[place] += n_bytes

    def top(self, count: int) -> tuple[Location, ...]:
        """The places with most bytes, largest first."""
        return tuple(place for place, _ in self.places.most_common(count))


@dataclass(kw_only=True)
class Sums:
    """Running sums over every file of every layer. Targets are those of GPU code."""

    owners: Counter[str] = field(default_factory=Counter)  # owner group -> bytes in all layers
    kinds: Counter[Kind] = field(default_factory=Counter)  # bytes in all layers; 0 for some
    visible_by_kind: defaultdict[Kind, Tally] = field(default_factory=_tallies)  # without `strippable`
    gpu_files: defaultdict[str, Tally] = field(default_factory=_tallies)  # visible, by their names' target
    gpu_in_libraries: defaultdict[str, Tally] = field(default_factory=_tallies)  # visible, by target
    cuttable: defaultdict[str, Tally] = field(default_factory=_tallies)  # of these, what a prune cuts
    libraries: list[LibraryCode] = field(default_factory=list)  # visible, with GPU code
    strippable: Tally = field(default_factory=Tally)  # visible debug information in libraries and programs
    cuda: Tally = field(default_factory=Tally)  # visible: CUDA's distributions, and its libraries elsewhere
    overwritten: Tally = field(default_factory=Tally)  # path -> content that a later layer replaces
    rewritten: Counter[str] = field(default_factory=Counter)  # of these, by the same content: why -> bytes
    deleted: Tally = field(default_factory=Tally)
    build_only: Tally = field(default_factory=Tally)  # compilers, build systems and -dev packages
    visible_bytes: int = 0
    n_files: int = 0


@dataclass(frozen=True)
class Base:
    """The base image: the lowest `n_layers` layers, and what shows that; 0 where nothing shows a base."""

    n_layers: int = 0
    evidence: str = ""
    name: str = ""


@dataclass(frozen=True)
class Duplicate:
    """Visible files of the same content, `unpacked_bytes` each, and what made the copies."""

    unpacked_bytes: int
    wasted_bytes: int  # of all copies but one
    paths: tuple[str, ...]
    cause: str = ""  # in reports that were saved before there was one


@dataclass(frozen=True)
class Copies:
    """Duplicates, largest waste first; `extra` are the rows that could be links to another."""

    duplicates: tuple[Duplicate, ...]
    extra: frozenset[int]


@dataclass(frozen=True)
class SecretPlace:
    """Where a credential was seen, and of which kinds; never the credential."""

    where: str
    kinds: tuple[str, ...]
    unpacked_bytes: int  # of the file; 0 in ENV, labels and history


@dataclass(kw_only=True)
class Facts(Sums):
    """An image, counted. Sums of `owners`, of `kinds` and of `layer_bytes` are equal."""

    labels: Mapping[str, str]  # without credentials, as are `commands`
    commands: tuple[str | None, ...]  # what made each layer
    ref: str
    wanted_targets: tuple[str, ...]
    all_needed: bool = False  # whether every wanted target is needed: no choice of a card is left
    host_cards: tuple[str, ...] = ()  # targets of this host's AMD cards
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


# Counting.

_SERVICE = (b"app", b"srv", b"usr/src/app", b"opt/weir")
_TOP_DIRECTORIES = 200
_CUDA_LIBRARY = re.compile(
    rb"^lib(cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cudart|cudss|nccl|nvrtc|nvJitLink|nvshmem"
    rb"|nvToolsExt|nvperf|(torch|c10)_(cuda|nvshmem)|caffe2_nvrtc)",
)
_CUDA_DISTRIBUTION = re.compile(r"(nvidia[-_].*|(pytorch[-_])?triton|cuda[-_].*|cupy[-_]cuda.*)$")
_NO_PARTS: Mapping[tuple[Kind, str], int] = {}


def gather_facts(
    contents: ImageContents, *, targets: tuple[str, ...] = (), top: int = 20, keep: KeepList | None = None
) -> Facts:
    """Count an image. `targets` are the GPUs it is for, by default those of its label; `top` bounds lists.

    With a keep-list, packages have the bytes that it names.
    """
    indexes = [layer.index or LayerIndex() for layer in contents.layers]
    merged = merge(indexes)
    ownership = find_owners(merged)
    assign_unlisted_files(merged, ownership)
    labels = contents.config.labels
    labelled = tuple(
        name.strip() for name in labels.get("io.weir.gpu-targets", "").split(",") if name.strip()
    )
    wanted = targets or labelled
    commands = [LayerCommand.of(layer.command or "") for layer in contents.layers]
    copies = find_copies(merged, commands)
    base = find_base(contents.config)
    owner_names = _OwnerNames(ownership, base.n_layers)
    counter = _ByteCounter(
        merged, owner_names, copies.extra, commands, ClaimCounter(targets_if_valid(wanted))
    )
    if keep is not None:
        counter.used = _used_rows(merged, keep)
    for position in range(len(indexes)):
        counter.layer(position)
    packages = counter.packages()
    credentials = exposed_values(contents)
    return Facts(
        **vars(counter.sums),
        labels={
            key: redacted(f"{key}={value}", credentials).removeprefix(f"{key}=")
            for key, value in labels.items()
        },
        commands=tuple(layer.command and redacted(layer.command, credentials) for layer in contents.layers),
        ref=contents.ref,
        wanted_targets=wanted,
        layer_bytes=tuple(layer.unpacked_bytes for layer in contents.layers),
        layer_stored_bytes=tuple(layer.stored_bytes for layer in contents.layers),
        unread=tuple((index.path(at), why) for index in indexes for at, why in index.unread.items()),
        duplicates=copies.duplicates,
        secrets=tuple(exposed_secrets(contents, merged)),
        claims=dict(counter.claims.claims),
        packages=packages,
        top_files=largest_files(merged, top, lambda row: owner_names.of_row(merged, row)),
        top_directories=largest_directories(counter.directories, min(top, _TOP_DIRECTORIES)),
        tree=counter.tree.tree(owner_names.names),
        dangling_links=len(merged.dangling),
        packages_left_out=ownership.left_out,
        base=replace(base, name=redacted(base.name, credentials)),
    )


def _used_rows(merged: Merged, keep: KeepList) -> frozenset[int]:
    """The rows of the visible files that a keep-list names."""
    rows = {
        merged.path(row).decode("utf-8", "surrogateescape"): row
        for row, visible in enumerate(merged.content_visible)
        if visible
    }
    used = keep.select(frozenset(rows))[0]
    return frozenset(row for path, row in rows.items() if path in used or source_of(path) in used)


class _OwnerNames:
    """Names the owner of bytes: a package, else the base image they came with, else what the path implies."""

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


class _ByteCounter:
    """Fills Sums, the tree and the packages' bytes in one pass over every file of every layer."""

    def __init__(
        self,
        merged: Merged,
        owner_names: _OwnerNames,
        extra: frozenset[int],
        commands: Sequence[LayerCommand],
        claims: ClaimCounter,
    ) -> None:
        ownership = owner_names.ownership
        self._merged, self._owner_names, self._ownership = merged, owner_names, ownership
        self._extra, self._commands, self.claims = extra, commands, claims
        self._finder = Finder(merged)
        self._classifier = Classifier()
        self.tree = TreeCounter(sum(sum(index.sizes) for index in merged.layers))
        self.sums = Sums()
        self.directories: Counter[bytes] = Counter()
        self._is_tool = [is_build_tool(package) for package in ownership.packages]
        self._cuda_locations = [_cuda_place(package) for package in ownership.packages]
        self.used: frozenset[int] | None = None  # the rows of files that a keep-list names
        n_packages = len(ownership.packages)
        self._unpacked, self._visible, self._files = [0] * n_packages, [0] * n_packages, [0] * n_packages
        self._used = [0] * n_packages

    def layer(self, position: int) -> None:
        """Count one layer's files."""
        index, row = self._merged.layers[position], self._merged.starts[position] - 1
        owners, visible = self._ownership.owner, self._merged.content_visible
        for at, (directory, name, size) in enumerate(zip(index.dirs, index.names, index.sizes, strict=True)):
            row += 1
            if not size:
                continue
            owner = owners[row]
            file = self._classifier.classify(directory, name)
            parts = _parts(index, at, file)
            rest = size - sum(parts.values()) if parts else size
            self.sums.kinds[file.kind] += rest
            for (kind, _), n_bytes in parts.items():
                self.sums.kinds[kind] += n_bytes
            self._unpacked[owner] += size
            self.tree.add(
                directory,
                name,
                size,
                layer=position,
                owner=owner,
                kind=file.kind,
                targets=file.targets,
                parts=parts,
                visible=bool(visible[row]),
            )
            if owner == UNOWNED:
                self.sums.owners[self._owner_names.group(directory, position)] += size
            if not visible[row]:
                self._hidden(row, size)
                continue
            self._visible[owner] += size
            if self.used is not None and row in self.used:
                self._used[owner] += size
            self._files[owner] += 1
            self.sums.n_files += 1
            self.sums.visible_bytes += size
            self.directories[directory] += size
            self.sums.visible_by_kind[file.kind].add(rest, file.anchor)
            if file.targets:
                self.sums.gpu_files["+".join(file.targets)].add(size, file.anchor)
            causes = self._causes(row, owner, file, join_path(directory, name), size)
            self.claims.add(rest, causes)
            if parts:
                fixed = index.fixed_code.get(at, frozenset())  # its bytes aren't saved: they become zeros
                movable = {t: n for t, n in index.gpu_code.get(at, {}).items() if t not in fixed}
                code = LibraryCode(movable, index.alignments.get(at, 0))
                if code.code:
                    self.sums.libraries.append(code)
                cut = self.claims.cut_from(code.code, alignment=code.alignment)
                self._visible_parts(parts, join_path(directory, name), causes, cut)

    def _visible_parts(
        self, parts: Mapping[tuple[Kind, str], int], path: bytes, causes: list[str], cut: frozenset[str]
    ) -> None:
        """Visible bytes inside a file whose kind differs from the rest of it; a prune takes `cut` out."""
        for (kind, target), n_bytes in parts.items():
            if kind is Kind.DEBUG:
                self.sums.strippable.add(n_bytes, path.rpartition(b"/")[0])
                self.claims.add(n_bytes, [*causes, STRIPPABLE])
                continue
            self.sums.visible_by_kind[kind].add(n_bytes, path)
            self.sums.gpu_in_libraries[target].add(n_bytes, path)
            if target in cut:
                self.sums.cuttable[target].add(n_bytes, path)
            self.claims.add(n_bytes, [*causes, FOREIGN_CODE] if target in cut else causes)

    def _causes(self, row: int, owner: int, file: Classification, path: bytes, size: int) -> list[str]:
        """Ids of the findings that would remove a visible file; adds to these findings' own sums."""
        causes = [OF_KIND[file.kind]] if file.kind in OF_KIND else []
        cuda = self._cuda_locations[owner] or (path if _CUDA_LIBRARY.match(path.rpartition(b"/")[2]) else b"")
        if cuda:
            self.sums.cuda.add(size, cuda)
            causes.append(CUDA)
        package = self._ownership.packages[owner]
        listed = owner != UNOWNED and package.manager is not Manager.ROCM
        if self._is_tool[owner] or (not listed and is_tool_directory(path)):
            self.sums.build_only.add(size, PackageName(package.name) if listed else file.anchor)
            causes.append(BUILD_ONLY)
        if row in self._extra:
            causes.append(DUPLICATES)
        if file.targets and self.claims.is_foreign("+".join(file.targets)):
            causes.append(FOREIGN_FILES)
        return causes

    def packages(self) -> tuple[PackageRow, ...]:
        """Every package with its bytes, largest first; adds the managers' sums to the groups."""
        rows = []
        for number, package in enumerate(self._ownership.packages):
            if number == UNOWNED:
                continue
            bytes_of = self._unpacked[number], self._visible[number], self._files[number]
            used = None if self.used is None else self._used[number]
            rows.append(
                PackageRow(
                    package.manager.value, package.name, package.version, package.place, *bytes_of, used
                )
            )
            self.sums.owners[package.manager.value] += self._unpacked[number]
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
            command = self._commands[self._merged.layer_of(above)]
            self.sums.rewritten[cause_of_rewriting(self._merged, command, above)] += size


def _cuda_place(package: Package) -> bytes:
    """How CUDA's own distributions are named in a finding; empty for all other packages."""
    by_pip = package.manager in (Manager.PYTHON, Manager.CONDA)
    if not (by_pip and _CUDA_DISTRIBUTION.match(package.name.lower())):
        return b""
    return f"{package.place}/{package.name} {package.version}".encode()


def _parts(index: LayerIndex, at: int, file: Classification) -> Mapping[tuple[Kind, str], int]:
    """Bytes inside a file whose kind differs from the rest of it, by kind and GPU target."""
    code, debug = index.gpu_code.get(at), index.debug.get(at)
    if not (code or debug) or file.targets:
        return _NO_PARTS
    parts = {(Kind.GPU_CODE, target): n_bytes for target, n_bytes in (code or {}).items()}
    if debug and file.kind is not Kind.DEBUG:
        parts[Kind.DEBUG, ""] = debug
    return parts


# The base image, by the history.

_CMD = re.compile(r"(/bin/sh -c #\(nop\)\s++)?CMD\b")
# `ADD file:0123 in / ` by docker, debuerreotype's note by Debian, `ADD rootfs.tar /` by buildkit
_ADDED_TO_ROOT = re.compile(r"(?:/bin/sh -c #\(nop\)\s++)?ADD (\S++)( in)? /\s*+(?:$|#)")
_BY_DEBIAN = "# debian.sh "
_NAME = "org.opencontainers.image.base.name"


def find_base(config: ImageConfig) -> Base:
    """The base of an image that was built on one; a base image itself has none."""
    n_layers = len(config.diff_ids)
    name = terminal(config.labels.get(_NAME, ""))
    if sum(step.has_layer for step in config.history) != n_layers:
        return Base()
    below = 0
    ends: list[int] = []
    for step in config.history:
        below += step.has_layer
        if _CMD.match(step.command) and 0 < below < n_layers:
            ends.append(below)
    if ends:
        return Base(ends[-1], "the CMD that ends it in the history", name)
    layer_commands = [step.command for step in config.history if step.has_layer]
    if n_layers > 1 and _adds_root_tree(layer_commands[0]):
        return Base(1, "its first step, which adds a root file system", name)
    return Base()


def _adds_root_tree(command: str) -> bool:
    match = _ADDED_TO_ROOT.match(command)
    if not match:
        return command.startswith(_BY_DEBIAN)
    source, by_docker = match.groups()
    return source.startswith("file:") if by_docker else "rootfs" in source or ".tar" in source[1:]


# Copies of the same content, and what made them.

ROCM_TWICE = "ROCm in /opt/rocm and in torch/lib"
TWO_COPIES = "copied by two COPY steps"
LATER_RUN = "copied, or hard-linked, by a RUN in a later layer"
ONE_LAYER = "copies within a layer"
CHOWN = "chown or chmod in a later layer"
BROKEN_LINK = "a hard link made in a later layer"
SECOND_COPY = "the same COPY again"
REWRITTEN = "rewritten by a later layer"


def find_copies(merged: Merged, commands: Sequence[LayerCommand]) -> Copies:
    """Group visible files by content. `commands` are those that made each layer."""
    groups: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for index, start in zip(merged.layers, merged.starts, strict=True):
        for at, digest in index.digests.items():
            if merged.content_visible[start + at]:
                groups[index.sizes[at], digest].append(start + at)
    duplicates, extra = [], []
    for (size, _), rows in groups.items():
        if len(rows) > 1:
            paths = sorted(merged.path(row) for row in rows)
            cause = _cause(merged, commands, rows, paths)
            duplicates.append(Duplicate(size, size * (len(rows) - 1), tuple(map(terminal, paths)), cause))
            extra += rows[1:]
    by_waste = sorted(duplicates, key=lambda row: (-row.wasted_bytes, row.paths))
    return Copies(tuple(by_waste), frozenset(extra))


def cause_of_rewriting(merged: Merged, command: LayerCommand, row: int) -> str:
    """Why a layer made by `command` repeats at `row` the content that the same path had in a lower layer."""
    if command.changes_owners:
        return CHOWN
    if row in merged.linked:
        return BROKEN_LINK
    return SECOND_COPY if command.copies else REWRITTEN


def _cause(merged: Merged, commands: Sequence[LayerCommand], rows: list[int], paths: list[bytes]) -> str:
    if any(path.startswith(b"opt/rocm") for path in paths) and any(b"/torch/lib/" in path for path in paths):
        return ROCM_TWICE
    layers = {merged.layer_of(row) for row in rows}
    if len(layers) == 1:
        return ONE_LAYER
    return TWO_COPIES if all(commands[layer].copies for layer in layers) else LATER_RUN


# Credentials.


def exposed_secrets(contents: ImageContents, merged: Merged) -> Iterator[SecretPlace]:
    """Every place of a credential: ENV, labels, history, attestations, files, also those removed later."""
    yield from _metadata_secrets(contents)
    yield from _stored_secrets(merged)


def exposed_values(contents: ImageContents) -> frozenset[bytes]:
    """The credentials of all these places, which no part of a report may repeat."""
    values: set[bytes] = set()
    for _, text in _texts(contents):
        values |= credentials_in_text(text).values
    for document in contents.attestations.documents:
        values |= credentials_in_document(document).values
    for layer in contents.layers:
        values |= layer.index.secret_values if layer.index else set()
    return frozenset(values)


def _texts(contents: ImageContents) -> Iterator[tuple[str, str]]:
    """Every text of the config in which credentials are searched for, and where it is."""
    config = contents.config
    yield from ((f"ENV {text.partition('=')[0]}", text) for text in config.env)
    yield from ((f"label {key}", f"{key}={value}") for key, value in config.labels.items())
    yield from ((f"history, step {n}", step.command) for n, step in enumerate(config.history))


def _metadata_secrets(contents: ImageContents) -> Iterator[SecretPlace]:
    """Credentials in an image's metadata."""
    for where, text in _texts(contents):
        kinds = credentials_in_text(text).kinds
        if kinds:
            yield SecretPlace(terminal(where), kinds, 0)
    for document in contents.attestations.documents:
        kinds = credentials_in_document(document).kinds
        if kinds:
            yield SecretPlace("an attestation (provenance or SBOM) of the image", kinds, 0)


def _stored_secrets(merged: Merged) -> Iterator[SecretPlace]:
    """Credentials in files of any layer."""
    for layer, (index, start) in enumerate(zip(merged.layers, merged.starts, strict=True)):
        for at, kinds in index.secrets.items():
            later = "" if merged.content_visible[start + at] else ", gone from later layers but still stored"
            where = f"{terminal(index.path(at))} (layer {layer}{later})"
            yield SecretPlace(where, kinds, index.sizes[at])

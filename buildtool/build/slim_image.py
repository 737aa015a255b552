"""Writes a slim image from a whole one: the files of a keep-list and their margin, and a list of the rest.

Layers stay what they are, with fewer members; one more on top holds the list of what was left out, and the
hook that names it to programs that ask for it (images/left_out.py).
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from buildtool import gpucode, prune
from buildtool import keep as keep_package
from buildtool.build.plan import ENVIRONMENT, ImagePlan
from buildtool.build.wheel_layer import PREFIX, SITE
from buildtool.build.workplace import Workplace, fingerprint
from buildtool.core.errors import DataError
from buildtool.core.files import scratch
from buildtool.core.model import LABEL
from buildtool.core.shipped import IMAGES
from buildtool.gpucode.plan import PrunePlan, streamed
from buildtool.gpucode.source import GpuCodeError, PruneRefused, Source, VerifyFailed
from buildtool.gpucode.strip import plan_strip
from buildtool.gpucode.target import TargetId
from buildtool.gpucode.used import Used
from buildtool.image.flatten import Entry, flattened, tar_chunks
from buildtool.image.layer_writer import LayerWriter, TarMembers
from buildtool.image.written import LayerFile, WrittenImage, written_image
from buildtool.keep.keep_list import HINT, KeepList
from buildtool.keep.margin import Node, Reason, Tree, kept_paths, python_path
from buildtool.keep.symbols import needed_libraries
from buildtool.prune.trees import keys_in, plan_file
from probes.core.quoting import command, terminal
from probes.core.units import counted, decimal_bytes

WHOLE = f"{LABEL}.whole"  # label of a slim image: the digest of the whole one
MANIFEST, HOOK = f"{PREFIX}/left-out.txt", f"{SITE}/sitecustomize.py"
_ELF_MAGIC = b"\x7fELF"
_MOST_SOURCE = 16 << 20  # bytes of a Python module
_KINDS = {"isreg": "file", "isdir": "directory", "issym": "link", "islnk": "hard link"}


def write_slim(
    workplace: Workplace,
    planned: ImagePlan,
    whole: WrittenImage,
    keep: KeepList,
    *,
    name: str,
    epoch: int,
    anew: bool = False,
) -> WrittenImage:
    """Write what `keep` names of an image, and its margin; `name` is the list's in commands.

    Raises DataError for a list that names nothing of the image, or a module that it doesn't have.
    """
    job = _Job(workplace, planned, whole, keep, name)
    store = workplace.layers
    source = fingerprint(tuple(Path(str(each.__file__)).parent for each in (keep_package, gpucode, prune)))
    own = Path(__file__).read_bytes()
    base = ([layer.diff_id for layer in whole.layers], sorted(keep.lines), source, own)
    layers = []
    for number in range(len(whole.layers)):
        key = store.key("slim", number, *base)
        layers.append(store.bring(key, partial(job.write_layer, number), anew=anew)[0])
    hook = (IMAGES / "left_out.py").read_bytes()
    key = store.key("left out", *base, name, planned.variant.name, hook, epoch)
    layers.append(store.bring(key, partial(job.write_list, hook, epoch), anew=anew)[0])
    config = json.loads(whole.config)
    run = config["config"]
    run["Labels"] = {**run["Labels"], WHOLE: whole.digest}
    step = {"created": config["created"], "created_by": f"weir build --keep: {terminal(name)}"}
    image = written_image(config, layers, [*config["history"], step])
    store.put(image)
    return image


@dataclass
class _Scan:
    """What a pass over a whole image found: its tree, and how ELF files are written without their symbols.

    `used`: the GPU code that runs loaded, without the rest of which they are written, too.
    """

    used: Used | None = None
    targets: tuple[TargetId, ...] = ()

    nodes: dict[str, Node] = field(default_factory=dict)
    cuts: dict[str, PrunePlan] = field(default_factory=dict)


@dataclass
class _Job:
    """One slim image that is being written."""

    workplace: Workplace
    planned: ImagePlan
    whole: WrittenImage
    keep: KeepList
    name: str
    _passing: Iterator[Entry] | None = None  # a pass over all members, by layers from the bottom up
    _held: Entry | None = None  # its first member of a layer that wasn't asked for yet

    def entries(self) -> Iterator[Entry]:
        """The members of the whole image."""
        return flattened([partial(self.workplace.layers.content, layer) for layer in self.whole.layers])

    def _of_layer(self, number: int) -> Iterator[Entry]:
        """The members of one layer: of the pass that gave those of the layers below, where there was one."""
        if self._passing is None or (self._held is not None and self._held.layer > number):
            self._passing, self._held = self.entries(), None
        waiting, self._held = self._held, None
        for entry in itertools.chain([waiting] if waiting else [], self._passing):
            if entry.layer > number:
                self._held = entry
                return
            if entry.layer == number:
                yield entry
        self._passing = None

    @cached_property
    def scan(self) -> _Scan:
        """All members, and what has to be known of their content."""
        with scratch(self.workplace.state) as folder:
            scan = _Scan(
                self._used(folder / "file"), tuple(map(TargetId.parse, self.planned.variant.gpu_targets))
            )
            for entry in self.entries():
                _scan(entry, scan, folder / "file")
        return scan

    def _used(self, place: Path) -> Used | None:
        """The GPU code that the list names; None where no run looked."""
        if not self.keep.gpu_code:
            return None
        present: set[str] = set()
        for entry in self.entries():
            if entry.info.isreg():
                with _as_elf(entry, place) as source:
                    present |= keys_in(source) if source else set()
        used = Used.of(self.keep.gpu_code, present, self.keep.generated_code)
        if not used.is_all:
            n_absent = len(self.keep.gpu_code - present)
            self.workplace.progress(
                f"warning: {counted(n_absent, 'piece')} of GPU code in {self.name} are not in the image, so "
                "PTX and other code that can't be read stays"
            )
        return used

    @cached_property
    def kept(self) -> Mapping[str, Reason]:
        """What stays, and why. Says so."""
        nodes = self.scan.nodes
        tree = Tree(nodes, python_path([f"{key}={value}" for key, value in ENVIRONMENT.items()], nodes))
        observed, unused = self.keep.select(tree.files, tree.resolve)
        if not observed:
            raise DataError(f"{self.name} names no file of {self.planned.variant.name}", HINT)
        if unused:
            self.workplace.progress(
                f"warning: {counted(len(unused), 'line')} of {self.name} name nothing in the image, such as "
                f"{terminal(unused[0][:200])}: it was observed on another version; observe it again"
            )
        kept = kept_paths(tree, observed, self.keep.modules)
        self._tell(kept)
        return kept

    def _tell(self, kept: Mapping[str, Reason]) -> None:
        sizes: Counter[str] = Counter()
        for path, node in self.scan.nodes.items():
            sizes[kept[path].value if path in kept else "left out"] += node.n_bytes
        cut = sum(self._cut_bytes(path) for path in self.scan.cuts if path in kept)
        rows = [
            f"{decimal_bytes(sizes[reason.value])} {reason.value}" for reason in Reason if sizes[reason.value]
        ]
        self.workplace.progress(
            f"{self.planned.variant.name}: of {decimal_bytes(sum(sizes.values()))} stay {'; '.join(rows)}. "
            f"Left out: {decimal_bytes(sizes['left out'])} of files, {decimal_bytes(cut)} of symbol tables"
            f"{' and of GPU code that no run loaded' if self.keep.gpu_code else ''}"
        )

    def _cut_bytes(self, path: str) -> int:
        return self.scan.nodes[path].n_bytes - self.scan.cuts[path].bytes_after

    def write_layer(self, number: int, layer: LayerWriter) -> LayerFile:
        """One of the whole image's layers, less what doesn't stay."""
        kept, cuts = self.kept, self.scan.cuts
        stay = (entry for entry in self._of_layer(number) if entry.info.name in kept)
        for chunk in tar_chunks(_without_symbols(entry, cuts.get(entry.info.name)) for entry in stay):
            layer.write(chunk)
        return layer.finish()

    def write_list(self, hook: bytes, epoch: int, layer: LayerWriter) -> LayerFile:
        """The layer with the list of what was left out, and the hook."""
        text = self._list().encode("utf-8", "surrogateescape")
        members = TarMembers(layer, epoch)
        members.file(MANIFEST, len(text), [text])
        members.file(HOOK, len(hook), [hook])
        return members.end()

    def _list(self) -> str:
        """What was left out, with bytes; first the commands that bring it back."""
        variant, nodes = self.planned.variant.name, self.scan.nodes
        lines = [
            f"restore {command('weir', 'build', variant, '--keep', self.name, '--restore')}",
            f"whole {command('weir', 'build', variant, '--undo')}",
        ]
        for path in sorted(nodes):
            if path not in self.kept and nodes[path].kind != "directory":
                lines.append(f"file {nodes[path].n_bytes} /{terminal(path)}")
            elif path in self.kept and path in self.scan.cuts:
                what = "gpu-code" if self.scan.cuts[path].removed_bytes else "symbols"
                lines.append(f"{what} {self._cut_bytes(path)} /{terminal(path)}")
        return "\n".join(lines) + "\n"


def _scan(entry: Entry, scan: _Scan, place: Path) -> None:
    """Add a member to a scan; `place` is a file for the content of one at a time."""
    info = entry.info
    kind = next((word for test, word in _KINDS.items() if getattr(info, test)()), "other")
    node = Node(kind, info.size if kind == "file" else 0, info.linkname)
    if kind == "file" and info.name.endswith(".py") and info.size <= _MOST_SOURCE:
        node = Node(kind, info.size, source=b"".join(entry.content))
    elif kind == "file":
        with _as_elf(entry, place) as source:
            if source:
                node = Node(kind, info.size, needed=needed_libraries(source))
                if cut := _cut(source, scan):
                    scan.cuts[info.name] = cut
    scan.nodes[info.name] = node


@contextmanager
def _as_elf(entry: Entry, place: Path) -> Iterator[Source | None]:
    """A member's content, by way of a file at `place`; None for what is no ELF file."""
    first = next(entry.content, b"")
    if not first.startswith(_ELF_MAGIC):
        yield None
        return
    with place.open("w+b") as file:
        file.write(first)
        for piece in entry.content:
            file.write(piece)
        file.flush()
        yield Source(entry.info.size, partial(_read_at, file.fileno()))


def _cut(source: Source, scan: _Scan) -> PrunePlan | None:
    """What of an ELF file goes: symbols, and GPU code that no run loaded, where that can be cut."""
    if scan.used:
        with suppress(GpuCodeError, PruneRefused, VerifyFailed):
            planned = plan_file(source, scan.targets, strict=False, used=scan.used, strip=True)
            plan = planned.plan
            if plan.changed:
                planned.verify(plan.view(source))
            return plan if plan.changed else None
    return plan_strip(source)


def _read_at(descriptor: int, offset: int, length: int) -> bytes:
    return os.pread(descriptor, length, offset)


def _without_symbols(entry: Entry, cut: PrunePlan | None) -> Entry:
    if cut is None:
        return entry
    entry.info.size = cut.bytes_after
    return Entry(entry.info, streamed(cut, entry.content), entry.layer)


def whole_digest(labels: Mapping[str, str], ref: str) -> str:
    """The digest of the whole image that a slim one was made from. Raises DataError for a whole one."""
    if not labels.get(WHOLE):
        raise DataError(
            f"{ref} was not built with --keep, or not from here: there is nothing to undo",
            "leave --undo out to build it",
        )
    return labels[WHOLE]

"""Writes a slim image from a whole one: the files of a keep-list and their margin, and a list of the rest.

Layers stay what they are, with fewer members; one more on top holds the list of what was left out, and the
hook that names it to programs that ask for it (images/left_out.py).
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from buildtool import keep as keep_package
from buildtool.build.plan import ENVIRONMENT, ImagePlan
from buildtool.build.wheel_layer import PREFIX, SITE
from buildtool.build.workplace import Workplace, fingerprint
from buildtool.core.errors import DataError
from buildtool.core.files import scratch
from buildtool.core.model import LABEL
from buildtool.core.shipped import IMAGES
from buildtool.gpucode.plan import PrunePlan, streamed
from buildtool.gpucode.source import Source
from buildtool.gpucode.strip import plan_strip
from buildtool.image.flatten import Entry, flattened, tar_chunks
from buildtool.image.layer_writer import LayerWriter, TarMembers
from buildtool.image.written import LayerFile, WrittenImage, written_image
from buildtool.keep.keep_list import HINT, KeepList
from buildtool.keep.margin import Node, Reason, Tree, kept_paths, python_path
from buildtool.keep.symbols import needed_libraries
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
    source = fingerprint((Path(keep_package.__file__).parent,))
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
    """What a pass over a whole image found: its tree, and how files are written without their symbols."""

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
        scan = _Scan()
        with scratch(self.workplace.state) as folder:
            for entry in self.entries():
                _scan(entry, scan, folder / "file")
        return scan

    @cached_property
    def kept(self) -> Mapping[str, Reason]:
        """What stays, and why. Says so."""
        nodes = self.scan.nodes
        tree = Tree(nodes, python_path([f"{key}={value}" for key, value in ENVIRONMENT.items()], nodes))
        observed, unused = self.keep.select(tree.files)
        if not observed:
            raise DataError(f"{self.name} names no file of {self.planned.variant.name}", HINT)
        if unused:
            self.workplace.progress(
                f"warning: {counted(len(unused), 'line')} of {self.name} name nothing in the image, such as "
                f"{terminal(unused[0])}: it was observed on another version; observe it again"
            )
        kept = kept_paths(tree, observed, self.keep.modules)
        self._tell(kept)
        return kept

    def _tell(self, kept: Mapping[str, Reason]) -> None:
        sizes: Counter[str] = Counter()
        for path, node in self.scan.nodes.items():
            sizes[kept[path].value if path in kept else "left out"] += node.n_bytes
        cut = sum(self._symbol_bytes(path) for path in self.scan.cuts if path in kept)
        rows = [
            f"{decimal_bytes(sizes[reason.value])} {reason.value}" for reason in Reason if sizes[reason.value]
        ]
        self.workplace.progress(
            f"{self.planned.variant.name}: of {decimal_bytes(sum(sizes.values()))} stay {'; '.join(rows)}. "
            f"Left out: {decimal_bytes(sizes['left out'])} of files, {decimal_bytes(cut)} of symbol tables"
        )

    def _symbol_bytes(self, path: str) -> int:
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
                lines.append(f"symbols {self._symbol_bytes(path)} /{terminal(path)}")
        return "\n".join(lines) + "\n"


def _scan(entry: Entry, scan: _Scan, place: Path) -> None:
    """Add a member to a scan; `place` is a file for the content of one at a time."""
    info = entry.info
    kind = next((word for test, word in _KINDS.items() if getattr(info, test)()), "other")
    node = Node(kind, info.size if kind == "file" else 0, info.linkname)
    if kind == "file" and info.name.endswith(".py") and info.size <= _MOST_SOURCE:
        node = Node(kind, info.size, source=b"".join(entry.content))
    elif kind == "file":
        first = next(entry.content, b"")
        if first.startswith(_ELF_MAGIC):
            with place.open("w+b") as file:
                file.write(first)
                for piece in entry.content:
                    file.write(piece)
                file.flush()
                source = Source(info.size, partial(_read_at, file.fileno()))
                node = Node(kind, info.size, needed=needed_libraries(source))
                if cut := plan_strip(source):
                    scan.cuts[info.name] = cut
    scan.nodes[info.name] = node


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

"""Writes an image from its inputs: root file system, wheels and service, each a layer, and the config.

No engine and no root is needed, and nothing of this host gets into the image: the same inputs give the same
manifest, whatever the umask, locale, time zone and user.
"""

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from buildtool.build.bytecode import SCRIPT, imported_names, write_bytecode
from buildtool.build.layer_store import LayerStore, Make
from buildtool.build.payload import payload_files
from buildtool.build.plan import PACKAGES, ImagePlan, config_of, history_of, wheel_layers
from buildtool.build.registry_base import RegistryBase
from buildtool.build.workplace import Workplace
from buildtool.core.command import stop_children
from buildtool.core.errors import DataError
from buildtool.core.files import scratch, sha256_of
from buildtool.core.model import Wheel
from buildtool.core.parallel import run_parallel
from buildtool.image.archive import member_path
from buildtool.image.layer_writer import LayerWriter, TarMembers, pieces_at
from buildtool.image.reader import host_platform
from buildtool.image.streams import decompressed, peek, sniff
from buildtool.image.tar import FILE, TarReader
from buildtool.image.written import LayerFile, WrittenImage, written_image
from buildtool.prune.inputs import PRUNER, PrunedInputs
from buildtool.prune.manifest import IMAGE_PATH
from probes.core.units import decimal_bytes

# some libraries ask who they run as
USER_LINES = {
    "etc/passwd": "weir:x:10001:10001::/tmp:/usr/sbin/nologin\n",
    "etc/group": "weir:x:10001:\n",
}
_MOST_BYTES = 1 << 20  # of a base's /etc/passwd
LIBRARY = f"installer {importlib.metadata.version('installer')}"  # another one may write other files


def write_image(
    workplace: Workplace,
    planned: ImagePlan,
    *,
    base: RegistryBase | None,
    pruned: PrunedInputs | None,
    epoch: int,
    anew: bool = False,
) -> WrittenImage:
    """Write the image's layers that aren't there yet (all of them with `anew`), and its documents.

    `base` is the image that a registry has, None for a root file system of ours; `pruned` inputs take the
    place of their originals. Raises DataError for an input that is damaged or can't be installed,
    EnvironmentMissing for a full disk.
    """
    job = _Job(workplace, planned, base=base, pruned=pruned, epoch=epoch, anew=anew)
    layers = job.layers()
    config = config_of(planned, epoch, host_platform(), base.config if base else {})
    image = written_image(config, layers, history_of(planned, epoch, base.history if base else ()))
    workplace.layers.put(image)
    return image


class _Job:
    """One image that is being written."""

    def __init__(
        self,
        workplace: Workplace,
        planned: ImagePlan,
        *,
        base: RegistryBase | None,
        pruned: PrunedInputs | None,
        epoch: int,
        anew: bool,
    ) -> None:
        self._workplace = workplace
        self._store: LayerStore = workplace.layers
        self._planned = planned
        self._base = base
        self._pruned = pruned
        self._epoch = epoch
        self._anew = anew

    def layers(self) -> list[LayerFile]:
        """From the bottom up; two are made at a time."""
        resolved, variant = self._planned.resolved, self._planned.variant
        prune = (variant.gpu_targets, PRUNER) if variant.prune else ()  # decides a pruned input's bytes
        tasks: list[Callable[[], LayerFile]] = []
        if self._base is None:
            tasks.append(self._task("base", ("base", resolved.base.pin, prune), self._make_base))
        for name, wheels in wheel_layers(resolved.wheels):
            hashes = [wheel.sha256 for wheel in wheels]
            below = resolved.base.pin if name == PACKAGES else ""
            inputs = ("wheels", LIBRARY, name, hashes, prune, below, self._epoch)
            tasks.append(self._task(name, inputs, partial(self._make_wheels, name, wheels)))
        files = payload_files()
        if self._base is None:
            modules = imported_names(files)
            hashes = [wheel.sha256 for wheel in resolved.wheels]
            python = (sha256_of(SCRIPT), resolved.base.pin, resolved.python)
            key = ("bytecode", *python, hashes, prune, modules, self._epoch)
            tasks.append(self._task("bytecode", key, partial(self._make_bytecode, modules)))
        if self._pruned:
            files[IMAGE_PATH] = self._pruned.manifest().encode()
        content = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
        tasks.append(
            self._task("service", ("service", content, self._epoch), partial(self._make_service, files))
        )
        return [
            *(self._base.layers if self._base else ()),
            *run_parallel(tasks, workers=2, stop=stop_children),
        ]

    def _task(self, name: str, inputs: tuple[object, ...], make: Make) -> Callable[[], LayerFile]:
        def bring() -> LayerFile:
            layer, is_new = self._store.bring(self._store.key(*inputs), make, anew=self._anew)
            if is_new:
                self._workplace.progress(
                    f"{self._planned.variant.name}: wrote the layer `{name}`, {decimal_bytes(layer.n_bytes)}"
                )
            return layer

        return bring

    def _make_base(self, layer: LayerWriter) -> LayerFile:
        for piece in pieces_at(self._rootfs()):
            layer.write(piece)
        return layer.finish()

    def _rootfs(self) -> Path:
        """The root file system's tar, pruned where the image is, and checked."""
        path = self._workplace.rootfs_of(self._planned, self._epoch)
        assert path is not None  # a registry's base isn't made here
        pin = self._planned.resolved.base.pin
        if self._pruned:
            return self._pruned.path(pin, path)
        self._workplace.rootfs.verify(path, pin)
        return path

    def _make_wheels(self, name: str, wheels: tuple[Wheel, ...], layer: LayerWriter) -> LayerFile:
        from buildtool.build.wheel_layer import install_wheels  # and the library: few builds make a layer

        members = TarMembers(layer, self._epoch)
        install_wheels(self._verified(wheels), members)
        if name == PACKAGES:
            for path, line in USER_LINES.items():
                text = self._text_below(path)
                text += b"" if text.endswith(b"\n") or not text else b"\n"
                content = text + line.encode()
                members.file(path, len(content), [content])
        return members.end()

    def _verified(self, wheels: Sequence[Wheel]) -> dict[str, Path]:
        """Files of wheels by their names: pruned where the image is, and checked."""
        pruned = self._pruned
        scanned = pruned.by_sha256 if pruned else {}
        self._workplace.wheels.verify([wheel for wheel in wheels if wheel.sha256 not in scanned])
        places = {wheel: self._workplace.wheels.path(wheel) for wheel in wheels}
        return {
            path.name: pruned.path(wheel.sha256, path) if pruned else path for wheel, path in places.items()
        }

    def _make_bytecode(self, modules: Sequence[str], layer: LayerWriter) -> LayerFile:
        resolved = self._planned.resolved
        members = TarMembers(layer, self._epoch)
        wheels = [*self._verified(resolved.wheels).values()]
        state = self._workplace.state
        may_run = not os.statvfs(state).f_flag & os.ST_NOEXEC  # the image's Python, where it is unpacked
        with scratch(state if may_run else None) as folder:
            write_bytecode(
                members,
                self._rootfs(),
                wheels,
                modules,
                python=resolved.python,
                epoch=self._epoch,
                folder=folder,
            )
        return members.end()

    def _text_below(self, path: str) -> bytes:
        """A small file of the base; empty where it has none."""
        if self._base is None:
            return _text_in(pieces_at(self._rootfs()), path) or b""
        for layer in reversed(self._base.layers):
            chunks = self._store.content(layer)
            head, chunks = peek(chunks)
            text = _text_in(decompressed(chunks, sniff(head), place="the base"), path)
            if text is not None:
                return text
        return b""

    def _make_service(self, files: dict[str, bytes], layer: LayerWriter) -> LayerFile:
        members = TarMembers(layer, self._epoch)
        for path, content in sorted(files.items()):
            members.file(path, len(content), [content])
        return members.end()


def _text_in(chunks: Iterator[bytes], path: str) -> bytes | None:
    """A small file in a tar; None where it isn't there. Raises DataError."""
    reader = TarReader(chunks, place="the base")
    for name, kind, n_bytes, _ in reader:
        if kind == FILE and member_path(name) == path:
            if n_bytes > _MOST_BYTES:
                raise DataError(f"the base's /{path} has {n_bytes:,} bytes")
            return b"".join(reader.content())
    return None

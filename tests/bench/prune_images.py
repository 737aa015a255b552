"""The image bars of `make bench-prune`: `rocm` built for one card at a time, foretold, proved, built twice.

Images have tags of their own (`weir/bench-rocm-*`) and a state directory of their own; tags and directory are
gone in the end. Inputs come from the caches of `make images`.
"""

import hashlib
import json
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from board import Board, tell

from buildtool.audit.audit import audit_image, audit_path, progress_lines
from buildtool.audit.options import AuditOptions
from buildtool.audit.report import AuditReport
from buildtool.build import catalog, pipeline
from buildtool.build.lockfile import Lock, spec_sha256
from buildtool.build.plan import BuildPlan
from buildtool.build.workplace import Workplace
from buildtool.core.model import BuiltImage, Variant
from buildtool.engine.client import Engine
from buildtool.engine.reference import parse_new_name

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".weir"
SOURCE = "debian-rocm"  # the stack that the bars are about, whatever other index answers
LIMIT_BYTES = 1_500_000_000
# ROCr has kernels of its own for each of 36 cards, 35 kB each, as bare code objects, which no prune cuts; the
# audit has seen since decision 107
SMALL_BYTES = 100_000
LIBRARY_BYTES = 5_000_000  # smaller ones add nothing to 100 MB for a target
FORETOLD = ("foreign-gfx", "foreign-gfx-in-libraries")  # the audit's findings that a prune remedies
SERVE = """
python3 -m service 2>/tmp/log & service=$!
for _ in $(seq 60); do python3 -m service.health && break; sleep 1; done
python3 -m service.health && grep -o 'ready weights=[a-z]*' /tmp/log; kill $service
"""
PROBE = "python3 -m probes run transfer --quick --out /tmp/reports"


class Extractor(Protocol):
    """LLVM, as far as it is needed here."""

    def bytes_by_target(self, library: Path) -> Mapping[str, int]:
        """Bytes of the code objects that it extracts from a library."""


def image_bars(board: Board, targets: Sequence[str], llvm: Extractor) -> None:
    """All bars of the pruned images. Raises ToolError when one can't be built at all."""
    engine = Engine()
    with _workplace() as place:
        foretold, whole_bytes = _predict(place, engine, targets)
        _unpruned_targets(board, place.state / "unpruned", llvm)
        board.figure("rocm: unpruned root file system", whole_bytes, "bytes")
        for target in targets:
            plan = _planned(place, engine, _variant(target))
            with _image(place, engine, plan) as image:
                proved = pipeline.prove(place, plan.images[0], image, engine)
                board.line(
                    {f"rocm {target}: proved": f"torch {proved.torch_version} computes, {proved.rocminfo}"}
                )
                report = _audit(image, engine, target)
                _sizes(board, target, report, foretold_bytes=foretold[target], whole_bytes=whole_bytes)
                _still_works(board, target, image, engine)
        _same_twice(board, place, engine, targets[0])


def _predict(place: Workplace, engine: Engine, targets: Sequence[str]) -> tuple[dict[str, int], int]:
    """What the audit of the unpruned layer says that a prune to each target saves, and that layer's bytes.

    The layer is put into an OCI layout as a link: the engine would need 15 GB to hold it.
    """
    whole = replace(_variant("whole"), gpu_targets=(), prune=False)
    plan = _planned(place, engine, whole)
    [made] = plan.images
    rootfs = place.rootfs_of(made, plan.epoch)
    assert rootfs
    layout = _layout(place.state / "unpruned", rootfs, made.resolved.base.pin)
    saved: dict[str, int] = {}
    for target in targets:
        tell(f"auditing the unpruned layer for {target}")
        report = audit_path(layout, options=AuditOptions(targets=(target,)), tick=lambda _bytes: None)
        saved[target] = sum(row.bytes for row in report.findings if row.id in FORETOLD)
    return saved, report.totals.unpacked_bytes


def _unpruned_targets(board: Board, layout: Path, llvm: Extractor) -> None:
    """What the unpruned image has code for, counted by LLVM: neither our reader nor our manifest is asked."""
    tell("asking LLVM for the code in the unpruned root file system")
    found: Counter[str] = Counter()
    [layer] = (path for path in (layout / "blobs" / "sha256").iterdir() if path.stat().st_size > 10**9)
    place = layout.parent / "library.so"
    with tarfile.open(layer) as tar:
        for info in tar:
            if info.isreg() and ".so" in info.name and info.size > LIBRARY_BYTES:
                with tar.extractfile(info) as packed, place.open("wb") as file:  # type: ignore[union-attr]
                    shutil.copyfileobj(packed, file, 1 << 20)
                found.update(llvm.bytes_by_target(place))
                place.unlink()
    board.line(
        {"unpruned root file system: bytes of code in libraries, by LLVM": dict(sorted(found.items()))}
    )
    large = sum(n_bytes > 100_000_000 for n_bytes in found.values())
    board.bar("rocm-gfx-targets", large, 8, "targets with over 100 MB, by LLVM", at_least=True)


def _layout(folder: Path, layer: Path, layer_sha256: str) -> Path:
    """An image of one uncompressed layer as an OCI layout directory."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    os.link(layer, blobs / layer_sha256)

    def blob(kind: str, value: object) -> dict[str, object]:
        data = json.dumps(value).encode()
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        media = f"application/vnd.oci.image.{kind}.v1+json"
        return {"mediaType": media, "digest": f"sha256:{name}", "size": len(data)}

    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer_sha256}"]}
    config = blob("config", {"os": "linux", "architecture": "amd64", "rootfs": rootfs})
    described = {
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": f"sha256:{layer_sha256}",
        "size": layer.stat().st_size,
    }
    manifest = blob("manifest", {"schemaVersion": 2, "config": config, "layers": [described]})
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    return folder


def _sizes(board: Board, target: str, report: AuditReport, *, foretold_bytes: int, whole_bytes: int) -> None:
    board.bar(f"rocm {target}: unpacked", report.totals.unpacked_bytes, LIMIT_BYTES, "bytes")
    off = abs(foretold_bytes / (whole_bytes - report.layers[0].unpacked_bytes) - 1)
    board.bar(f"rocm {target}: the audit's prediction off by", off, 0.01, "of the saving")
    others = {name: n for name, n in report.gpu_code.by_target.items() if name != target}
    large = [name for name, n_bytes in others.items() if n_bytes > SMALL_BYTES]
    board.bar(f"rocm {target}: targets but its own with over 0.1 MB", len(large), 0, "targets", which=large)
    board.figure(f"rocm {target}: code for other targets in all", sum(others.values()) / 1e6, "MB")


def _still_works(board: Board, target: str, image: BuiltImage, engine: Engine) -> None:
    tell(f"starting service and probes of {image.ref}")
    served = "ready weights=" in engine.run(image.ref, ["sh", "-c", SERVE]).stdout
    board.bar(f"rocm {target}: service that doesn't answer", not served, 0, "services")
    probed = "report:" in engine.run(image.ref, ["sh", "-c", PROBE]).stdout
    board.bar(f"rocm {target}: probes that don't run", not probed, 0, "probes")


def _same_twice(board: Board, place: Workplace, engine: Engine, target: str) -> None:
    """Pruned and written twice, each without any cache."""
    digests = set()
    for _ in range(2):
        shutil.rmtree(place.state / "pruned", ignore_errors=True)
        plan = _planned(place, engine, _variant(target))
        digests.add(pipeline.write(place, plan, anew=True)[plan.images[0].variant.name].digest)
    board.bar(f"rocm {target}: digests of two builds without cache", len(digests), 1, "digests")


def _audit(image: BuiltImage, engine: Engine, target: str) -> AuditReport:
    tell(f"auditing {image.ref} for {target}")
    return audit_image(
        image.ref,
        engine=engine,
        options=AuditOptions(targets=(target,)),
        tick=progress_lines(tell, image.ref),
    )


def _variant(target: str) -> Variant:
    rocm = _rocm()
    debian = tuple(source for source in rocm.torch if source.name == SOURCE)
    return replace(rocm, name=f"bench-rocm-{target}", gpu_targets=(target,), torch=debian)


def _rocm() -> Variant:
    [rocm] = catalog.load().select(("rocm",))
    return rocm


@contextmanager
def _workplace() -> Iterator[Workplace]:
    """A state directory that borrows wheels and root file systems from the user's, and nothing else."""
    state = STATE / "bench" / "images"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    for cache in ("wheels", "rootfs"):
        (STATE / cache).mkdir(exist_ok=True)
        (state / cache).symlink_to(STATE / cache)
    try:
        yield Workplace(state, state / "lock.json", tell)
    finally:
        shutil.rmtree(state, ignore_errors=True)


@contextmanager
def _image(place: Workplace, engine: Engine, plan: BuildPlan) -> Iterator[BuiltImage]:
    """The image of a plan in the engine, for as long as it's looked at."""
    [variant] = [each.variant for each in plan.images]
    tell(f"building {variant.ref}")
    written = pipeline.write(place, plan)
    named = f"weir/bench-loaded-{os.getpid()}"
    ids = pipeline.load(place, written, named, engine=engine)
    try:
        engine.tag(ids[variant.name], parse_new_name(variant.ref))
        yield BuiltImage(variant.name, variant.ref, written[variant.name].digest, ids[variant.name])
    finally:
        engine.remove_tag(variant.ref)
        engine.remove_tag(f"{named}-{variant.name}")


def _planned(place: Workplace, engine: Engine, variant: Variant) -> BuildPlan:
    _lock_as_rocm(place, variant)
    epoch = catalog.load().source_date_epoch
    return pipeline.make_plan(place, [[variant]], engine=engine, epoch=epoch, every_target=True)


def _lock_as_rocm(place: Workplace, variant: Variant) -> None:
    """The inputs that the repository's lock pins for `rocm`, pinned for this variant as well."""
    theirs, ours = Lock.load(ROOT / "images" / "variants.lock.json"), Lock.load(place.lock)
    pinned = theirs.get(_rocm())
    if pinned and pinned.torch_source == SOURCE:
        ours.put(replace(pinned, variant=variant.name, spec_sha256=spec_sha256(variant)))
        ours.put_tools(theirs.tools)

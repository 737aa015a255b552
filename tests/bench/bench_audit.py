"""The bars of the audit, one JSON line each: speed, memory, hostile input, layer rules, secrets, real images.

Run by `make bench-audit`, as root, on a quiet machine with the images of `make images` in the engine (load
makes times worse, ours and the reference's alike; it is printed). Bars go to standard output, progress to
standard error. Exit code 1 when a bar is missed, 130 after Ctrl-C; scratch files are gone in any case.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"
# the root first: tests/unit has a folder called `probes` as well
sys.path[:0] = [str(ROOT), str(UNIT / "audit"), str(UNIT / "image"), str(UNIT), str(Path(__file__).parent)]

import audit_heavy  # noqa: E402
import audit_inputs  # noqa: E402
import audit_naive  # noqa: E402
import audit_stacks  # noqa: E402
import audit_tars  # noqa: E402
import audit_texts  # noqa: E402
import bench_prune  # noqa: E402
import hostile  # noqa: E402
import image_maker as make  # noqa: E402
import injection as injected  # noqa: E402
import planted  # noqa: E402
from board import Board, tell  # noqa: E402

from buildtool.audit.audit import audit_path  # noqa: E402
from buildtool.audit.options import AuditOptions  # noqa: E402
from buildtool.audit.report import AuditReport  # noqa: E402
from buildtool.cli import program  # noqa: E402
from buildtool.core.errors import ToolError  # noqa: E402
from buildtool.image.archive import FileArchive, StreamArchive  # noqa: E402
from buildtool.image.gpu_code import GpuCodeCounter  # noqa: E402
from buildtool.image.reader import host_platform, read_image  # noqa: E402
from buildtool.image.streams import sniff  # noqa: E402
from buildtool.image.tar import TarReader  # noqa: E402

AUDIT = [sys.executable, "-m", "buildtool", "audit"]
REAL = ("weir/cpu:latest", "weir/rocm:latest")
ROUNDS = 5  # of timing
MOST_MIB = 256  # of memory for any archive
EXITS = {"0", "1", "2", "5"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stacks", type=int, default=2000)
    parser.add_argument("--vast-gb", type=int, default=45)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="some of the bars")
    args = parser.parse_args()
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    board = Board(whole=args == parser.parse_args([]))
    try:
        with tempfile.TemporaryDirectory(dir=ROOT / ".weir", prefix="bench-audit.") as name:
            for group in args.only:
                tell(f"{group}: {GROUPS[group].__doc__}")
                GROUPS[group](board, Path(name), args)
    except KeyboardInterrupt:
        print("interrupted; scratch files of the bench are gone", file=sys.stderr)
        return 130
    return board.finish()


def real_images(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Time against the reference tools, sums, what nobody owns, and false alarms."""
    alarms = 0
    for ref in REAL:
        file = work / "image.tar"
        saved = subprocess.run(["docker", "save", ref, "-o", file], capture_output=True, check=False)
        if saved.returncode:
            board.waive(f"{ref}: all bars", f"the engine doesn't have it: {saved.stderr.decode().strip()}")
            continue
        report = audit_path(file, options=AuditOptions(), tick=lambda _: None)
        board.bar(f"{ref}: attributed bytes off by", unattributed_difference(report), 0, "bytes")
        share = report.owners.get("unowned", 0) / report.totals.unpacked_bytes
        board.bar(f"{ref}: bytes that nobody owns", share, 0.01, "of the image")
        alarms += sum(len(row.paths) for row in report.findings if row.id == "secrets")
        layers = packed_layers(file, work)
        rounds = [
            (spent(partial(read_by_audit, file)), spent(partial(read_by_reference, file, layers)))
            for _ in range(ROUNDS)
        ]
        audit, reference = (
            Spent(*(map(statistics.median, zip(*side, strict=True)))) for side in zip(*rounds, strict=True)
        )
        board.line({f"{ref}: rounds": [[[round(s, 2) for s in side] for side in row] for row in rounds]})
        board.bar(
            f"{ref}: wall time over the reference's (medians)", audit.wall_s / reference.wall_s, 1.5, "ratio"
        )
        board.bar(
            f"{ref}: processor seconds over the reference's (medians)",
            audit.cpu_s / reference.cpu_s,
            2.2,
            "ratio",
        )
        for path in (file, *(layer for _, layer in layers)):
            path.unlink()
    board.bar("real images: false alarms of secrets", alarms, 1, "places")


def unattributed_difference(report: AuditReport) -> int:
    """0 when owners, kinds and layers have the same sum."""
    total = sum(layer.unpacked_bytes for layer in report.layers)
    sums = sum(report.owners.values()), sum(report.kinds.values()), report.totals.unpacked_bytes
    return max(abs(total - part) for part in sums)


class Spent(NamedTuple):
    """What a reading of an image took, with all its programs and threads."""

    wall_s: float
    cpu_s: float


def spent(action: Callable[[], None]) -> Spent:
    """Runs programs to their end; the audit's threads work side by side, the reference's programs in turn."""
    begun, before = time.monotonic(), os.times()
    action()
    after = os.times()
    cpu_s = sum(after[at] - before[at] for at in (2, 3))  # of children
    return Spent(time.monotonic() - begun, cpu_s)


def read_by_audit(file: Path) -> None:
    subprocess.run([*AUDIT, file], capture_output=True, check=True)


def read_by_reference(file: Path, layers: list[tuple[str, Path]]) -> None:
    """`sha256sum` of the archive, then each layer through the tool that packed it."""
    commands = [["sha256sum", file], *([tool, "-q", "-dc", layer] for tool, layer in layers)]
    with Path(os.devnull).open("wb") as nowhere:
        for words in commands:
            subprocess.run(words, stdout=nowhere, check=True)


def packed_layers(file: Path, into: Path) -> list[tuple[str, Path]]:
    """The compressed layers of an archive as files, each with the tool that reads it."""
    found = []
    with file.open("rb") as archive:
        for start, length in FileArchive(file).spans():
            archive.seek(start)
            form = sniff(archive.read(512)).value
            if form in ("gzip", "zstd"):
                archive.seek(start)
                layer = into / f"layer-{start}"
                layer.write_bytes(archive.read(length))
                found.append((form, layer))
    return found


def vast(board: Board, work: Path, args: argparse.Namespace) -> None:
    """A large image of holes, 400,000 files: makes it, reads it."""
    file = work / "vast.tar"
    audit_inputs.vast_image(file, n_bytes=args.vast_gb * 10**9, n_files=400_000)
    begun = time.monotonic()
    code, peak_mib = audit_inputs.audited_with_peak(file)
    seconds = time.monotonic() - begun
    board.line(
        {"vast image": f"{args.vast_gb} GB in 400,000 files", "seconds": round(seconds, 1), "exit": code}
    )
    board.bar("vast image: peak memory", peak_mib if code == 0 else 9e9, 256, "MiB")
    file.unlink()


def headers(board: Board, work: Path, args: argparse.Namespace) -> None:
    """300,000 small files' headers, five times."""
    chunks = list(audit_inputs.header_stream(30))
    rates = []
    for _ in range(5):
        begun = time.process_time()  # one thread and no waiting: others' load is left out
        count = sum(1 for _ in TarReader(iter(chunks), place="headers"))
        rates.append(count / (time.process_time() - begun))
    board.bar("header walking", statistics.median(rates), 400_000, "entries/s", at_least=True)


def hostile_archives(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Every archive of the hostile corpus, and bombs of 16 GiB, each in a watched process."""
    corpus = [
        (f"{group}: {variant}", partial(bytes, content)) for group, variant, content in hostile.corpus()
    ]
    scratch = work / "hostile"
    scratch.mkdir()
    tempfile.tempdir = str(scratch)
    outcomes = {}
    for name, made in (*corpus, *audit_heavy.cases()):
        file = scratch / "evil.tar"
        audit_heavy.write(made, file)
        outcome = audit_inputs.watched(lambda file=file: program.main(["audit", "--all", str(file)]), scratch)
        outcomes[name] = outcome
        if outcome.said not in EXITS or outcome.written or list(scratch.iterdir()) != [file]:
            board.line({"hostile": name, "said": outcome.said, "wrote": outcome.written})
    tempfile.tempdir = None
    classes, rows = {name.partition(":")[0] for name in outcomes}, outcomes.values()
    board.bar("hostile archives: classes", len(classes), 24, "classes", at_least=True)
    board.bar("hostile archives: files", len(outcomes), 120, "files", at_least=True)
    board.bar("hostile archives: tracebacks", sum(row.said not in EXITS for row in rows), 0, "files")
    board.bar("hostile archives: written outside scratch", sum(bool(row.written) for row in rows), 0, "files")
    slowest = max(outcomes, key=lambda name: outcomes[name].seconds)
    largest = max(outcomes, key=lambda name: outcomes[name].peak_mib)
    cpu_s = round(outcomes[slowest].cpu_seconds, 2)
    board.bar("hostile archives: slowest", outcomes[slowest].seconds, 5, "s", which=slowest, cpu_s=cpu_s)
    board.bar("hostile archives: peak memory", outcomes[largest].peak_mib, MOST_MIB, "MiB", which=largest)


def corpora(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Tars of Go's and CPython's tests, and mutated headers, as Go's reader and we read them."""
    audit_tars.judge_corpora(board, work)


def mutations(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Tar headers whose numeric fields have 2,000 values each."""
    audit_tars.judge_mutations(board, work)


def damage(board: Board, work: Path, args: argparse.Namespace) -> None:
    """1,000 flipped bits and 500 truncations, over all blobs of three dialects."""
    layers = [make.tar(make.file("f", bytes(range(256)) * 20)), make.tar(make.file("g", b"g" * 900))]
    chance = random.Random(1)
    undetected = 0
    dialects = [
        (make.oci_layout, make.gzipped),
        (make.docker_25, make.zstandard),
        (make.oci_layout, make.plain),
    ]
    for number in range(1500):
        write, pack = dialects[number % 3]
        members = write(make.Image(layers, pack, architecture=host_platform().architecture))
        path = chance.choice([name for name in sorted(members) if name.startswith("blobs/")])
        content = bytearray(members[path])
        if number < 1000:
            bit = chance.randrange(len(content) * 8)
            content[bit // 8] ^= 1 << bit % 8
        else:
            del content[chance.randrange(len(content)) :]
        undetected += is_readable(members | {path: bytes(content)})
    board.bar("bit flips and truncations: undetected", undetected, 0, "of 1500")


def is_readable(members: make.Members) -> bool:
    try:
        read_image(StreamArchive(make.chunks(make.archive(members)), label="damaged"), label="damaged")
    except ToolError:
        return False
    return True


def stacks(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Random layer stacks, applied by umoci, by the engine and by us."""
    umoci = audit_stacks.find_umoci(work)
    if umoci is None:
        board.waive("layer stacks against umoci", "no umoci here, and apt-get has none")
    else:
        wrong = audit_stacks.differences(partial(audit_stacks.by_umoci, umoci), work, range(args.stacks))
        board.bar("layer stacks: differences from umoci", wrong, 0, f"of {args.stacks}")
    told = [number for number in range(args.stacks // 2) if audit_stacks.has_told_parents(number)]
    try:
        wrong = audit_stacks.differences(audit_stacks.by_engine, work, told)
    except (subprocess.CalledProcessError, OSError) as error:
        board.waive("layer stacks against the engine", f"it doesn't take them: {error}")
        return
    board.bar("layer stacks: differences from the engine", wrong, 0, f"of {len(told)}")


def dialects(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Every dialect of archives, each also shuffled, without manifest.json, and without any list."""
    lost_lists = ((), ("manifest.json",), ("manifest.json", "index.json", "repositories"))
    layers = [make.tar(make.file("one", b"1" * 900)), make.tar(make.file("two", bytes(70_000)))]
    right: Counter[str] = Counter()
    for name, (write, pack) in make.DIALECTS.items():
        for lost in lost_lists:
            image = make.Image(layers, pack, architecture=host_platform().architecture)
            members = {path: content for path, content in write(image).items() if path not in lost}
            order = random.Random(name).sample(sorted(members), len(members))
            contents = read_image(
                StreamArchive(make.chunks(make.archive(members, order)), label=name), label=name
            )
            sizes = [list(layer.index.sizes) if layer.index else [] for layer in contents.layers]
            right[name] += sizes == [[900], [70_000]]
    good = sum(count == len(lost_lists) for count in right.values())
    board.bar(
        "dialects read wrong, shuffled or with lists lost", len(right) - good, 0, "dialects", of=len(right)
    )


def secrets(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Planted credentials."""
    import test_audit_secrets as planting

    found = told = 0
    for row in planted.planted():
        report = planting.audited(row)
        found += any(finding.id == "secrets" for finding in report.findings)
        told += row.secret in planting.to_json(report) and row.secret != "x"
    count = len(planted.planted())
    board.bar("planted secrets missed", count - found, 0, "secrets", of=count)
    board.bar("planted secrets told in the report", told, 0, "secrets")


def gpu_code(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Bytes by processor against the files that LLVM's own extraction writes."""
    try:
        trees = {bootstrap.suite: bench_prune.bring_tree(bootstrap) for bootstrap in bench_prune.SUITES}
    except ToolError as error:
        board.waive("GPU code by target against llvm-objdump", str(error))
        return
    referee_root = list(trees.values())[-1]
    for bootstrap, names in bench_prune.SUITES.items():
        for library in bench_prune.real_libraries(trees[bootstrap.suite], names):
            ours, theirs = by_probe(library), by_llvm(library, referee_root)
            off = sum(abs(ours.get(key, 0) - theirs.get(key, 0)) for key in {*ours, *theirs})
            board.line({"gpu code": library.name, "targets": len(theirs), "bytes": sum(theirs.values())})
            board.bar(f"{bootstrap.suite} {library.name}: bytes by target off by", off, 0, "bytes")


def by_probe(library: Path) -> dict[str, int]:
    probe = GpuCodeCounter(library.stat().st_size)
    with library.open("rb") as opened:
        while piece := opened.read(1 << 18):
            probe.feed(piece)
    return dict(probe.stored_bytes_by_processor())


def by_llvm(library: Path, root: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    with bench_prune.workplace(root) as folder:
        place = folder / "lib.so"
        os.link(library, place)
        script = f"cd {folder.name} && {bench_prune.REFEREE} --offloading /{place.relative_to(root)}"
        subprocess.run(["chroot", root, "sh", "-c", script], check=True, capture_output=True)
        for path in folder.iterdir():
            target = path.name.rpartition("--")[2] or path.name.rpartition("-")[2]
            if path != place and target.startswith("gfx"):
                found[target.partition(":")[0]] += path.stat().st_size
    return found


def naive(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Plain `pip install torch` against `cpu`, as they were last built: lists of their files, audited."""
    recorded = audit_naive.load()
    judged = audit_naive.judge(recorded)
    board.line({"cpu-naive": recorded.made, "remedies": sorted(judged.remedies)})
    board.figure("cpu-naive: CUDA that the finding names", judged.cuda_bytes, "bytes")
    board.figure("cpu-naive: CUDA by the wheels' lists", recorded.cuda_bytes, "bytes")
    board.figure("cpu-naive: predicted Python bytes", judged.predicted_bytes, "bytes")
    board.figure("cpu: Python bytes", recorded.slim.unpacked_bytes, "bytes")
    missed = abs(judged.cuda_bytes / recorded.cuda_bytes - 1)
    board.bar("cpu-naive: bytes of CUDA that the finding names, off by", missed, 0.01, "of CUDA's bytes")
    off = abs(judged.predicted_bytes / recorded.slim.unpacked_bytes - 1)
    board.bar("cpu-naive: predicted Python bytes off by", off, 0.05, "of the cpu image's")


def injection(board: Board, work: Path, args: argparse.Namespace) -> None:
    """10,000 hostile texts through shells, BuildKit, Markdown renderers, an HTML parser, onto a terminal."""
    injected.judge(board, work)


def long_texts(board: Board, work: Path, args: argparse.Namespace) -> None:
    """Every reader, and whole audits, on 1 MiB of runs and near misses, by processor time."""
    scratch = work / "texts"
    scratch.mkdir()
    rows = [(f"reader of {name}", audit_texts.of_reader(name, scratch)) for name in audit_texts.READERS]
    rows += [(f"audit, {place}", audit_texts.of_audits(place, scratch)) for place in audit_texts.PLACES]
    for name, (worst, count) in rows:
        figures = {"texts": count, "s": round(worst.seconds, 2), "MiB": round(worst.peak_mib)}
        board.line({"1 MiB of text": name, **figures, "slowest": worst.what, "failed": worst.failed})
    board.bar("1 MiB of text: slowest", max(worst.seconds for _, (worst, _) in rows), 2, "s of processor")
    board.bar("1 MiB of text: peak memory", max(worst.peak_mib for _, (worst, _) in rows), 256, "MiB")
    board.bar("1 MiB of text: tracebacks", sum(len(worst.failed) for _, (worst, _) in rows), 0, "texts")


Group = Callable[[Board, Path, argparse.Namespace], None]
GROUPS: dict[str, Group] = {
    "headers": headers,
    "real": real_images,
    "vast": vast,
    "hostile": hostile_archives,
    "corpora": corpora,
    "mutations": mutations,
    "damage": damage,
    "stacks": stacks,
    "dialects": dialects,
    "secrets": secrets,
    "gpu": gpu_code,
    "naive": naive,
    "injection": injection,
    "texts": long_texts,
}

if __name__ == "__main__":
    sys.exit(main())

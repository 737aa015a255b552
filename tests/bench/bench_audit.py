"""The bars of the audit, one JSON line each: speed, memory, hostile input, layer rules, secrets, real images.

Run by `make bench-audit` on a quiet machine with the images of `make images` in the engine (others' load
makes times worse, ours and the reference's alike; it is printed). Exit code 1 when a bar is missed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "unit" / "audit"), str(Path(__file__).parent)]

import audit_inputs  # noqa: E402
import audit_stacks  # noqa: E402
import bench_prune  # noqa: E402
import hostile  # noqa: E402
import image_maker as make  # noqa: E402
import planted  # noqa: E402

from buildtool import cli  # noqa: E402
from buildtool.audit.archive import FileArchive, StreamArchive  # noqa: E402
from buildtool.audit.audit import Wish, audit_path  # noqa: E402
from buildtool.audit.gpuprobe import GpuProbe  # noqa: E402
from buildtool.audit.image import host_platform, read_image  # noqa: E402
from buildtool.audit.report import AuditReport  # noqa: E402
from buildtool.audit.tarwalk import TarReader  # noqa: E402
from buildtool.audit.unpack import sniff  # noqa: E402
from buildtool.errors import ToolError  # noqa: E402

AUDIT = [sys.executable, "-m", "buildtool", "audit"]
REAL = ("weir/cpu:latest", "weir/rocm:latest")
RECORDED = Path(__file__).parent / "recorded" / "cpu-naive.json"
EXITS = {"0", "1", "2", "5"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stacks", type=int, default=2000)
    parser.add_argument("--vast-gb", type=int, default=45)
    parser.add_argument("--only", nargs="*", help="names of groups: " + " ".join(GROUPS))
    args = parser.parse_args()
    os.chdir(ROOT)
    board = bench_prune.Board()
    board.line({"machine": f"{os.cpu_count()} cores", "load before": round(os.getloadavg()[0], 2)})
    with tempfile.TemporaryDirectory(dir=ROOT / ".weir", prefix="bench-audit.") as name:
        for group, run in GROUPS.items():
            if not args.only or group in args.only:
                run(board, Path(name), args)
    board.line({"load after": round(os.getloadavg()[0], 2)})
    return 1 if board.missed else 0


def real_images(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    """Time against the reference tools, sums, what nobody owns, and false alarms."""
    alarms = 0
    for ref in REAL:
        file = work / "image.tar"
        saved = subprocess.run(["docker", "save", ref, "-o", file], capture_output=True, check=False)
        if saved.returncode:
            board.waive(f"{ref}: all bars", f"the engine doesn't have it: {saved.stderr.decode().strip()}")
            continue
        report = audit_path(file, wish=Wish(), tick=lambda _: None)
        board.bar(f"{ref}: attributed bytes off by", unattributed_difference(report), 0, "bytes")
        share = report.owners.get("unowned", 0) / report.totals.unpacked_bytes
        board.bar(f"{ref}: bytes that nobody owns", share, 0.01, "of the image")
        alarms += sum(len(row.paths) for row in report.findings if row.id == "secrets")
        ratios = [
            timed(lambda file=file: subprocess.run([*AUDIT, str(file)], capture_output=True, check=True))
            / reference_seconds(file)
            for _ in range(3)
        ]
        board.bar(f"{ref}: time against sha256sum and decompression", statistics.median(ratios), 1.5, "ratio")
        file.unlink()
    board.bar("real images: false alarms of secrets", alarms, 1, "places")


def unattributed_difference(report: AuditReport) -> int:
    """0 when owners, kinds and layers have the same sum."""
    total = sum(layer.unpacked_bytes for layer in report.layers)
    sums = sum(report.owners.values()), sum(report.kinds.values()), report.totals.unpacked_bytes
    return max(abs(total - part) for part in sums)


def reference_seconds(file: Path) -> float:
    """`sha256sum` of the archive, then each layer through the tool that packed it."""
    seconds = timed(lambda: subprocess.run(["sha256sum", file], capture_output=True, check=True))
    archive = FileArchive(file)
    for start, length in archive.spans():
        with file.open("rb") as opened:
            opened.seek(start)
            tool = {"gzip": "gzip -dc", "zstd": "zstd -q -dc"}.get(sniff(opened.read(512)).value)
        if tool:
            cut = f"tail -c +{start + 1} '{file}' | head -c {length} | {tool} > /dev/null"
            seconds += timed(lambda cut=cut: subprocess.run(["sh", "-c", cut], check=True))
    return seconds


def timed(action) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def vast(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
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


def headers(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    chunks = list(audit_inputs.header_stream(30))
    rates = []
    for _ in range(5):
        begun = time.process_time()  # one thread and no waiting: others' load is left out
        count = sum(1 for _ in TarReader(iter(chunks), place="headers"))
        rates.append(count / (time.process_time() - begun))
    board.bar("header walking", statistics.median(rates), 400_000, "entries/s", at_least=True)


def hostile_archives(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    cases = list(hostile.corpus())
    scratch = work / "hostile"
    scratch.mkdir()
    tempfile.tempdir = str(scratch)
    outcomes = []
    for group, variant, content in cases:
        file = scratch / "evil.tar"
        file.write_bytes(content)
        outcome = audit_inputs.watched(lambda file=file: cli.main(["audit", str(file)]), scratch)
        outcomes.append(outcome)
        if outcome.said not in EXITS or outcome.written or list(scratch.iterdir()) != [file]:
            board.line({"hostile": f"{group}: {variant}", "said": outcome.said, "wrote": outcome.written})
    tempfile.tempdir = None
    classes = {group for group, _, _ in cases}
    board.bar("hostile archives: classes", len(classes), 24, "classes", at_least=True)
    board.bar("hostile archives: files", len(cases), 120, "files", at_least=True)
    board.bar("hostile archives: tracebacks", sum(row.said not in EXITS for row in outcomes), 0, "files")
    board.bar(
        "hostile archives: written outside scratch", sum(bool(row.written) for row in outcomes), 0, "files"
    )
    board.bar("hostile archives: slowest", max(row.seconds for row in outcomes), 5, "s")
    board.bar("hostile archives: peak memory", max(row.peak_mib for row in outcomes), 256, "MiB")


def damage(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
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


def stacks(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    umoci = audit_stacks.find_umoci(work)
    if umoci is None:
        board.waive("layer stacks against umoci", "no umoci here, and apt-get has none")
        return
    wrong = audit_stacks.differences(umoci, work, stacks=args.stacks)
    board.bar("layer stacks: differences from umoci", wrong, 0, f"of {args.stacks}")


def dialects(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    """Each also shuffled, without manifest.json, and without any list."""
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
        "dialects read alike, shuffled and with lists lost", good, 12, f"of {len(right)}", at_least=True
    )
    board.bar("dialects that failed", len(right) - good, 0, "dialects")


def secrets(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    import test_audit_secrets as planting

    found = told = 0
    for row in planted.planted():
        report = planting.audited(row)
        found += any(finding.id == "secrets" for finding in report.findings)
        told += row.secret in planting.to_json(report) and row.secret != "x"
    board.bar("planted secrets found", found, 60, f"of {len(planted.planted())}", at_least=True)
    board.bar("planted secrets told in the report", told, 0, "secrets")


def gpu_code(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
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
    with library.open("rb") as opened, GpuProbe(library.stat().st_size) as probe:
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


def naive(board: bench_prune.Board, work: Path, args: argparse.Namespace) -> None:
    """`cpu-naive` takes 15 GB and long to build: its audit was kept when it was last built."""
    if not RECORDED.exists():
        board.waive("cpu-naive", "no recorded audit; build it and keep its report")
        return
    for row in recorded_bars(json.loads(RECORDED.read_text())):
        board.bar(*row)


def recorded_bars(kept: dict[str, int]) -> Iterator[tuple[str, float, float, str]]:
    off = abs(kept["predicted_python_bytes"] / kept["cpu_python_bytes"] - 1)
    yield "cpu-naive (recorded): CUDA's bytes unnamed", int(kept["cuda_bytes"] < 1), 0, "findings"
    yield "cpu-naive (recorded): predicted Python bytes off by", off, 0.05, "of the cpu image's"


GROUPS = {
    "headers": headers,
    "real": real_images,
    "vast": vast,
    "hostile": hostile_archives,
    "damage": damage,
    "stacks": stacks,
    "dialects": dialects,
    "secrets": secrets,
    "gpu": gpu_code,
    "naive": naive,
}

if __name__ == "__main__":
    sys.exit(main())

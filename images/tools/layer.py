"""Runs inside the image build, network off, and makes one layer from what is mounted under /mnt.

`wheels` installs wheels into /opt/weir/lib without what no service needs (headers, static libraries, tests,
CMake files); `payload` copies a tree to /. Either sets the time of all that it changed to SOURCE_DATE_EPOCH,
so that the layer depends on its inputs alone (BuildKit's incremental context transfer keeps no directory
times, hence not COPY). No bytecode is written: that costs time at each start and saves its bytes and
the time to compile it (`make bench-build` measures all three).
"""

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import BinaryIO

INPUT = Path("/mnt")
TOOLS = Path("/media")
PREFIX = "/opt/weir"
UNNEEDED = re.compile(
    r"\.(?:a|h|hpp|hxx|cuh|cmake|pc)$"
    r"|^torch/(?:include|test|share)/"
    r"|^torch/bin/(?!torch_shm_manager)"
    r"|(?:^|/)tests?/(?!__init__\.py$).*\.(?:py|json|txt|npz|npy)$"
)
KEPT = re.compile(r"^torch/(?:testing|_inductor|utils)/")  # reached at run time, whatever their names say

sys.path.insert(0, str(next(TOOLS.glob("installer-*.whl"))))
from installer import install  # noqa: E402
from installer.destinations import SchemeDictionaryDestination  # noqa: E402
from installer.records import RecordEntry  # noqa: E402
from installer.sources import WheelFile  # noqa: E402


class Slim(SchemeDictionaryDestination):
    """Installs as a wheel asks to be installed, less what UNNEEDED names."""

    def __init__(self) -> None:
        """Everything goes below PREFIX; scripts are started by the image's own python3."""
        site, data = f"{PREFIX}/lib", f"{PREFIX}/share"
        folders = {
            "purelib": site,
            "platlib": site,
            "scripts": f"{PREFIX}/bin",
            "headers": f"{data}/include",
            "data": data,
        }
        super().__init__(
            folders, interpreter="/usr/bin/env python3", script_kind="posix", bytecode_optimization_levels=()
        )
        self.left_out: set[str] = set()

    def write_file(
        self, scheme: str, path: str | os.PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """One file of the wheel, or nothing for an unneeded one."""
        name = os.fspath(path)
        if UNNEEDED.search(name) and not KEPT.match(name):
            self.left_out.add(name)
            return RecordEntry(name, None, None)
        return super().write_file(scheme, path, stream, is_executable)

    def finalize_installation(
        self, scheme: str, record_file_path: str, records: list[tuple[str, RecordEntry]]
    ) -> None:
        """Write RECORD without the files that were left out: it must list what is there."""
        there = [(place, entry) for place, entry in records if entry.path not in self.left_out]
        super().finalize_installation(scheme, record_file_path, there)


def add_user(name: str, number: int) -> None:
    """A passwd and a group line: some libraries ask who they run as."""
    with Path("/etc/passwd").open("a") as passwd:
        passwd.write(f"{name}:x:{number}:{number}::/tmp:/usr/sbin/nologin\n")
    with Path("/etc/group").open("a") as group:
        group.write(f"{name}:x:{number}:\n")


def settle_times(since_ns: int, epoch: int) -> None:
    """Give everything that this layer changed the time `epoch`; what is mounted here stays alone."""
    mounted = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()} - {"/"}
    for folder, folders, files in os.walk("/"):
        top = folder.rstrip("/")
        folders[:] = [name for name in folders if f"{top}/{name}" not in mounted]
        for path in (folder, *(f"{top}/{name}" for name in (*files, *folders))):
            if path not in mounted and os.lstat(path).st_mtime_ns >= since_ns:
                os.utime(path, (epoch, epoch), follow_symlinks=False)


def install_wheels() -> None:
    """Install every wheel of the mounted folder, in order of name."""
    for wheel in sorted(INPUT.glob("*.whl")):
        begun = time.monotonic()
        slim = Slim()
        with WheelFile.open(wheel) as source:
            install(source, slim, additional_metadata={"INSTALLER": b"weir\n"})
        print(
            f"{wheel.name}: {time.monotonic() - begun:.1f} s, {len(slim.left_out)} files left out", flush=True
        )


def copy_payload(epoch: int) -> None:
    """Copy the mounted tree to /: contents alone, because ACLs and SELinux labels are those of the host."""
    for path in sorted(INPUT.rglob("*")):
        copy = Path("/") / path.relative_to(INPUT)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
            copy.chmod(0o755)
        else:
            shutil.copyfile(path, copy)
            copy.chmod(0o644)
        os.utime(copy, (epoch, epoch))


def main() -> None:
    """Make the layer that the arguments ask for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("wheels", "payload"))
    parser.add_argument("--user", help="NAME:UID to add")
    args = parser.parse_args()
    since_ns = time.time_ns() - 2_000_000_000  # file systems' clocks tick coarser than ours
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    if args.kind == "wheels":
        install_wheels()
    else:
        copy_payload(epoch)
    if args.user:
        name, _, number = args.user.partition(":")
        add_user(name, int(number))
    settle_times(since_ns, epoch)


main()

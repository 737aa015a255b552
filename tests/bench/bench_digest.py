"""Whether the same inputs give the same digest under other umasks, owners, modes above, and in other places.

Run by `make bench-digest`, as root. Each root file system is made from nothing by mmdebstrap, through a proxy
on loopback that keeps the mirror's answers, in a state directory of its own: below a directory with another
mode, of root or of another user with a default ACL and a group to pass on, on another file system, under
another umask, HOME, host name, time zone and locale. Then an image of it is written. Over the cases of a
variant there must be one tar and one manifest. Two of the cases are whole builds as well, without cache, by
which there must be one manifest, too.

Twelve cases have every pair of values; `--cases N` takes the first N, `--every` all 48. A minute a case for
`cpu` and three for `rocm` on 2 idle cores, and 40 GB of disk. The builds move the tags `weir/cpu:latest` and
`weir/rocm:latest`, as `weir build` does.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from board import Board, tell
from caching_proxy import caching_proxy

from buildtool.build import catalog, pipeline, plan
from buildtool.build.sources import with_packages
from buildtool.build.workplace import Workplace
from buildtool.core.model import Bootstrap, PinnedBase, Resolved, TorchBuild

ROOT = Path(__file__).parents[2]
UMASKS = (0o022, 0o077, 0o000, 0o027)
ABOVE = (0o755, 0o700, 0o711)
OWNERS = (0, 54321)
PLACES = ("/var/tmp", "/dev/shm/some other place")  # another file system, with blanks in its name
TASTES = (
    {"HOME": "/root", "TZ": "UTC", "LANG": "C.UTF-8"},
    {"HOME": "/nonexistent", "TZ": "Pacific/Kiritimati", "LANG": "de_DE.UTF-8", "LC_ALL": "C"},
)
# user::rwx group::rwx other::rwx: what every file that is made there gets, whatever the umask
OPEN_TO_ALL = struct.pack("<I" + 3 * "HHI", 2, *(n for tag in (1, 4, 32) for n in (tag, 7, 0xFFFFFFFF)))
AT_ONCE = 2


@dataclass(frozen=True)
class Case:
    """Where and how one root file system is made."""

    umask: int
    above: int
    owner: int
    place: str
    taste: int

    def __str__(self) -> str:
        return f"umask {self.umask:04o}, below {self.above:04o} of user {self.owner} in {self.place}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **TASTES[self.taste]}

    def prepare(self, big: bool) -> Path:
        """The state directory, which isn't there yet; what is `big` isn't put into memory."""
        place = Path(self.place if not big else self.place.replace("/dev/shm", "/var/tmp"))
        place.mkdir(exist_ok=True, mode=0o755)
        above = Path(tempfile.mkdtemp(dir=place, prefix="weir-digest-"))
        os.chown(above, self.owner, self.owner)
        above.chmod(self.above)
        if self.owner:
            (above / "state").mkdir()
            os.chown(above / "state", self.owner, self.owner)
            (above / "state").chmod(0o2755)
            os.setxattr(above / "state", "system.posix_acl_default", OPEN_TO_ALL)
        return above / "state"


def pairwise() -> list[Case]:
    """Twelve cases that hold every pair of values of two of the settings; the first four hold every value."""
    return [
        Case(UMASKS[i], ABOVE[j], OWNERS[(i + j) % 2], PLACES[(i // 2 + j) % 2], (i + j) % 2)
        for i, j in ((n % 4, n % 3) for n in range(12))
    ]


def every() -> list[Case]:
    return [Case(*values, taste=n % 2) for n, values in enumerate(product(UMASKS, ABOVE, OWNERS, PLACES))]


def recipe(name: str) -> tuple[Bootstrap, int]:
    """The last base of the variant's last torch source, which is Debian's, and the catalog's epoch."""
    found = catalog.load()
    [variant] = found.select((name,))
    bases = variant.torch[-1].base or variant.base
    base = next(base for base in bases if isinstance(base, Bootstrap))
    return with_packages(base, variant), found.source_date_epoch


def make(name: str, state: Path) -> None:
    """Make the root file system and its image, and print their digests: what a case's own process does."""
    base, epoch = recipe(name)
    place = Workplace(state, state / "lock.json", lambda line: print(line, file=sys.stderr))
    with place.alone():
        _, sha256 = place.rootfs.bring(base, epoch)
        [variant] = catalog.load().select((name,))
        bare = replace(variant, prune=False, base=(base,))  # its wheels and pruning are bench-layout's
        pinned = PinnedBase("bootstrap", base.suite, sha256)
        resolved = Resolved(name, "", variant.torch[0].name, TorchBuild.CPU, "3.11", pinned)
        bare = replace(bare, torch=(replace(variant.torch[0], base=()),), system_packages=())
        image = plan.ImagePlan(bare, resolved, state / "context")
        written = pipeline.write(place, plan.BuildPlan((image,), epoch))[name]
    print(json.dumps({"rootfs": sha256, "image": written.digest}))


def run_case(number: int, case: Case, *, name: str, proxy: str, kept: dict[int, Path]) -> dict[str, str]:
    """One case in a process of its own, with its own host name; its state stays where it is in `kept`."""
    state = case.prepare(big=name == "rocm")
    shell = f'umask {case.umask:04o}; hostname host-{number}; exec "$@"'
    command = [
        "unshare",
        "--uts",
        "sh",
        "-c",
        shell,
        "sh",
        sys.executable,
        __file__,
        "--make",
        name,
        str(state),
    ]
    done = subprocess.run(
        command, env={**case.environment, "http_proxy": proxy}, capture_output=True, text=True, check=False
    )
    if number in kept and not done.returncode:
        kept[number] = state
    else:
        shutil.rmtree(state.parent, ignore_errors=True)
    if done.returncode:
        raise SystemExit(f"{name}, {case}:\n{done.stderr[-3000:]}")
    found: dict[str, str] = json.loads(done.stdout)
    tell(f"{name}, case {number}, {case}: {', '.join(f'{k} {v[:12]}' for k, v in found.items())}")
    return found


def build(name: str, case: Case, state: Path, proxy: str) -> str:
    """The manifest digest of a build by the engine, in the case's state directory, with its own lock."""
    own = {"WEIR_STATE": str(state), "WEIR_LOCK": str(state.parent / "lock.json"), "http_proxy": proxy}
    reports = state.parent / "reports"
    tool = [
        sys.executable,
        "-m",
        "buildtool",
        "build",
        name,
        "--no-audit",
        "--no-cache",
        "--reports",
        str(reports),
    ]
    shell = f'umask {case.umask:04o}; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *tool],
        env={**case.environment, **own},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {case}:\n{done.stderr[-3000:]}")
    digest = str(json.loads((reports / f"{name}.build.json").read_text())["image"]["digest"])
    tell(f"{name}, built with {case}: {digest[:19]}")
    return digest


def bars(board: Board, name: str, cases: Sequence[Case], *, proxy: str, builds: bool) -> None:
    ends = {0: Path(), len(cases) - 1: Path()} if builds else {}
    one = partial(run_case, name=name, proxy=proxy, kept=ends)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(one, range(len(cases)), cases))
    for kind in ("rootfs", "image"):
        digests = sorted({each[kind] for each in found})
        board.bar(f"{name}: one {kind}", len(digests), 1, "digests", cases=len(cases), digests=digests)
    if builds:
        try:
            images = {build(name, cases[number], state, proxy) for number, state in ends.items()}
        finally:
            for state in ends.values():
                shutil.rmtree(state.parent, ignore_errors=True)
        board.bar(
            f"{name}: one built image", len(images), 1, "digests", builds=len(ends), digests=sorted(images)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=("cpu", "rocm"), default=["cpu", "rocm"])
    more = "how many of the twelve (default: all)"
    parser.add_argument("--cases", type=int, choices=range(2, 13), default=12, metavar="N", help=more)
    parser.add_argument("--every", action="store_true", help="all 48 combinations")
    parser.add_argument("--no-builds", action="store_true", help="root file systems and their images alone")
    parser.add_argument("--downloads", type=Path, help="keep the mirror's answers here for the next run")
    parser.add_argument("--make", nargs=2, metavar=("VARIANT", "STATE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make[0], Path(args.make[1]))
        return 0
    cases = every() if args.every else pairwise()[: args.cases]
    board = Board(whole=len(cases) >= 12 and len(args.only) == 2 and not args.no_builds)
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weir-downloads-") as name,
        caching_proxy(args.downloads or Path(name)) as proxy,
    ):
        for variant in args.only:
            bars(board, variant, cases, proxy=proxy, builds=not args.no_builds)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())

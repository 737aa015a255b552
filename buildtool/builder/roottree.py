"""Which members of mmdebstrap's tar go into a root file system, and with which owner, mode and time.

Nothing is removed from the tree on the host or written there: a symbolic link that a package put into it
leads to the host's own files. Members of the tar are left out instead.
"""

import re
import tarfile
from collections.abc import Sequence
from copy import copy
from fnmatch import translate
from pathlib import Path

from buildtool.gpucode.links import normal_path
from buildtool.prune.tarmembers import members_of

# Headers, static libraries and CMake files come with some runtime packages' dependencies. What apt keeps
# belongs to one user or another, by the modes of the directories above, and apt makes it again.
LEFT_OUT = (
    *("usr/include/*", "usr/lib/*.a", "var/log/*"),
    *("var/cache/apt/*", "var/cache/debconf/*", "var/cache/ldconfig/*", "var/lib/apt/lists/*"),
)
# Empty, whatever they were: mmdebstrap copies some from the host, with the modes that they have there.
EMPTIED = ("etc/resolv.conf", "etc/hostname", "etc/hosts", "etc/apt/sources.list", "etc/machine-id")
CAPABILITY = "SCHILY.xattr.security.capability"  # what packages set; other attributes are the host's


def settle(raw: Path, settled: Path, *, cut: Sequence[str], begun: int, epoch: int) -> list[str]:
    """Write the root file system in the tar `raw`, without what the patterns of `cut` match.

    What was made since `begun`, or is newer than `epoch`, gets the time `epoch`. Returns the patterns of
    `cut` that match nothing. Raises DataError for a tar that isn't whole, OSError.
    """
    members = members_of(raw)
    unwanted = _matcher(*LEFT_OUT, *EMPTIED, *cut)
    idle = {pattern: _matcher(pattern) for pattern in cut}
    gone: dict[str, tarfile.TarInfo] = {}  # by path
    moved: dict[str, str] = {}  # the path of what is gone -> the hard link that holds its content now
    with (
        tarfile.open(raw, "r:") as source,
        tarfile.open(
            settled, "w:", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as target,
    ):
        for member in members:
            info = content = member.info
            linked = normal_path(info.linkname) if info.islnk() else ""
            if linked in gone:
                content = gone[linked]
                info = copy(content)
                info.name = member.info.name
            if unwanted.match(member.path):
                gone[member.path] = info
                idle = {pattern: own for pattern, own in idle.items() if not own.match(member.path)}
                continue
            if linked in gone and moved.setdefault(linked, info.name) != info.name:
                info.type, info.linkname, info.size = tarfile.LNKTYPE, moved[linked], 0
            info.uname = info.gname = ""
            info.mtime = epoch if info.mtime >= min(begun, epoch) else int(info.mtime)
            info.pax_headers = {key: info.pax_headers[key] for key in {CAPABILITY} & info.pax_headers.keys()}
            target.addfile(info, source.extractfile(content) if info.isreg() else None)
        for name in EMPTIED:
            empty = tarfile.TarInfo(f"./{name}")
            empty.mtime = epoch
            target.addfile(empty)
    return list(idle)


def _matcher(*patterns: str) -> re.Pattern[str]:
    """Matches the paths that one of the patterns matches, and all below them."""
    return re.compile("|".join(translate(text) for name in patterns for text in (name, f"{name}/*")))

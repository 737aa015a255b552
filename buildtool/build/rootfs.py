"""Debian root file systems, made with mmdebstrap from the host's own mirror, kept by recipe in a cache.

mmdebstrap's tar is raw material: `write_clean_tar` decides what of it stays, so that nothing of the host
does and the same packages give the same bytes.
"""

import contextlib
import hashlib
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from fnmatch import translate
from pathlib import Path

from buildtool.core.command import CommandFailed, find, relay, run, run_streaming
from buildtool.core.errors import BuildFailed, EnvironmentMissing, SourceUnreachable, ToolError
from buildtool.core.files import (
    discard,
    locked,
    read_cached,
    replacing,
    require_sha256,
    scratch,
    sha256_of,
    write_text,
)
from buildtool.core.model import Bootstrap
from buildtool.core.progress import Progress
from buildtool.engine.provision import host_mirror
from buildtool.image.tar import normal_path
from buildtool.prune.archives import members_of, writing_tar
from buildtool.prune.trees import copy_range, open_source
from probes.core.invocation import host_command

# Headers, static libraries and CMake files come with some runtime packages' dependencies. What apt keeps
# belongs to one user or another, by the modes of the directories above, and apt makes it again.
LEFT_OUT = (
    *("usr/include/*", "usr/lib/*.a", "var/log/*"),
    *("var/cache/apt/*", "var/cache/debconf/*", "var/cache/ldconfig/*", "var/lib/apt/lists/*"),
)
# Empty, whatever they were: mmdebstrap copies some from the host, with the modes that they have there.
EMPTIED = ("etc/resolv.conf", "etc/hostname", "etc/hosts", "etc/apt/sources.list", "etc/machine-id")
CAPABILITY = "SCHILY.xattr.security.capability"  # what packages set; other attributes are the host's
# Read by people, not by programs; licences (copyright files) stay, as Debian's policy asks.
DPKG_EXCLUDES = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*", "/usr/share/info/*")
DPKG_INCLUDES = ("/usr/share/doc/*/copyright",)
RECIPE_VERSION = 4  # raise it when the same recipe would give other bytes
# The part of the host's environment that packages' scripts see: how to reach the mirror, no preferences.
FROM_HOST = ("PATH", "APT_CONFIG", "SSL_CERT_DIR", "SSL_CERT_FILE")
# The end of our process ends this one (--pdeathsig), which ends process 1 of the namespace and so all in it.
NAMESPACES = (
    *("setpriv", "--pdeathsig=KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
# mmdebstrap's and apt's messages for a mirror that doesn't answer, or lacks the suite or a package
UNSERVED = re.compile(
    r"E: (Failed to fetch|The repository|Unable to locate package|Package '.*' has no installation)"
)
UNSIGNED = "is not signed"
ROUTINE_LINE = re.compile(r"I: |E: mmdebstrap failed to run|rm: skipping|(Get|Ign|Hit):|Fetched |\s*$")
ABSENT = re.compile(r"dpkg: warning: ignoring request to remove (\S+) which isn't installed")
KILLED = "unshare: sigprocmask unblock failed"  # unshare's message when SIGKILL ended its program
SHOWN_LINES = 6  # of a failed bootstrap
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")  # in either case


# Runs in a shell on the host, so it holds no text of a catalog: names come in a variable, which packages'
# scripts don't see.
PURGE = """set -eu
root=$1 remove=$WEIR_REMOVE
unset WEIR_REMOVE
set --
while IFS= read -r name; do
    [ -z "$name" ] || set -- "$@" "$name"
done <<END
$remove
END
[ $# -eq 0 ] || chroot "$root" dpkg --purge --force-depends -- "$@"
"""


class RootfsCache:
    """Root file systems as plain tars, by recipe. `verbose`: print every line of mmdebstrap's output."""

    def __init__(self, directory: Path, progress: Progress, *, verbose: bool = False) -> None:
        self._directory = directory
        self._progress = progress
        self._verbose = verbose
        self._made: dict[Path, str] = {}  # by this object: its SHA-256

    def path(self, base: Bootstrap, epoch: int) -> Path:
        """Where the tar of this recipe is, or would be."""
        return self._directory / f"{base.suite}-{recipe_sha256(base, epoch)[:16]}.tar"

    def bring(
        self, base: Bootstrap, epoch: int, *, locked_as: str | None = None, update: bool = False
    ) -> tuple[Path, str]:
        """The tar and its SHA-256. It is made if it isn't here, or hasn't the SHA-256 that the lock names.

        Whoever can write the tar can also write its SHA-256: where the lock names another one, or with
        `update`, only what this object itself has made of the mirror's signed packages is taken.

        Raises EnvironmentMissing without mmdebstrap or disk space, SourceUnreachable when the mirror doesn't
        serve, BuildFailed when mmdebstrap fails otherwise.
        """
        path = self.path(base, epoch)
        digest = path.with_suffix(".sha256")
        with locked(
            path.with_suffix(".lock"), lambda: self._progress(f"{base.suite}: another build is making it")
        ):
            known = None
            if path.is_file():
                known = self._made.get(path) or (None if update else self._kept(path, locked_as))
            if known is None:
                discard(digest)  # otherwise it would vouch for a different file
                if not path.is_file():
                    discard(path)
                self._make(base, path, epoch)
                known = self._made[path] = sha256_of(path)
            if read_cached(digest, _hex_sha256) != known:
                write_text(digest, known)
            return path, known

    def _kept(self, path: Path, locked_as: str | None) -> str | None:
        """The SHA-256 of a tar of an earlier run; None where it isn't known or isn't the locked one."""
        known = read_cached(path.with_suffix(".sha256"), _hex_sha256)
        if locked_as in (None, known) or sha256_of(path) == locked_as:
            return locked_as or known
        self._progress(f"{path.name} isn't the root file system that is locked; making it again")
        return None

    def verify(self, path: Path, sha256: str) -> None:
        """Read a root file system once and compare. Raises DataError when it is damaged."""
        way_out = "run the same command again to make a new one"
        require_sha256(path, sha256, "the cached root file system", way_out=way_out)

    def _make(self, base: Bootstrap, path: Path, epoch: int) -> None:
        if not find("mmdebstrap"):
            raise EnvironmentMissing(
                f"no registry base answered, and `mmdebstrap`, which would make Debian {base.suite}, "
                "isn't installed",
                "on Debian or Ubuntu: apt-get install mmdebstrap; or make the registry reachable",
            )
        mirror = host_mirror()
        other = (
            "" if mirror else "; this host's apt names no Debian mirror, so the packages are those of its own"
        )
        self._progress(f"{base.suite}: making a root file system with mmdebstrap{other}")
        with replacing(path) as partial, scratch(path.parent) as folder, tree_directory(folder) as place:
            raw = folder / "raw.tar"
            raw.touch()  # what ends without a tar has made an empty one
            begun = int(time.time())
            try:
                run_streaming(
                    [*_namespace_prefix(), *mmdebstrap_command(base, raw, mirror)],
                    progress=relay(
                        lambda line: self._progress(f"{base.suite}: {line}"), _notable, verbose=self._verbose
                    ),
                    env={**environment(base, os.environ, epoch), "TMPDIR": str(place)},
                )
            except CommandFailed as error:
                raise bootstrap_error(error, base.suite) from error
            for pattern in write_clean_tar(raw, partial, cut=base.cut, begun=begun, epoch=epoch):
                self._progress(f"{base.suite}: warning: nothing matches {pattern!r} of the catalog's `cut`")


def _hex_sha256(text: str) -> str:
    """The text, if it is a SHA-256. Raises ValueError."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("not a SHA-256")
    return text


# ---- the recipe: what mmdebstrap is asked for --------------------------------------------------------------


def recipe_sha256(base: Bootstrap, epoch: int) -> str:
    """SHA-256 of everything that decides the tar's content: its name in the cache."""
    recipe = [base.suite, sorted(base.packages), sorted(base.remove), sorted(base.cut), epoch]
    recipe += [DPKG_EXCLUDES, LEFT_OUT, EMPTIED, RECIPE_VERSION]
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()


def mmdebstrap_command(base: Bootstrap, target: Path, mirror: str | None) -> list[str]:
    """The command line that makes a root file system, in the `environment` of its recipe. Pure."""
    doc = [f"--dpkgopt=path-exclude={p}" for p in DPKG_EXCLUDES] + [
        f"--dpkgopt=path-include={p}" for p in DPKG_INCLUDES
    ]
    return [
        "mmdebstrap",
        "--format=tar",
        "--variant=essential",
        f"--include={','.join(sorted(base.packages))}",
        *doc,
        f"--customize-hook={PURGE}",
        "--",
        base.suite,
        str(target),
        *([mirror] if mirror else []),
    ]


def environment(base: Bootstrap, host: Mapping[str, str], epoch: int) -> dict[str, str]:
    """The environment of mmdebstrap: PURGE's data, and settings of the host that leave no trace in the tree.

    Pure.
    """
    kept = {key: value for key, value in host.items() if key in FROM_HOST or key.lower() in PROXIES}
    # scripts of packages run Python: modules that they happen to load would leave bytecode
    fixed = {"HOME": "/root", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    return {
        **kept,
        **fixed,
        "WEIR_REMOVE": "\n".join(sorted(base.remove)),
        "SOURCE_DATE_EPOCH": str(epoch),
    }


def _namespace_prefix() -> Sequence[str]:
    """The command prefix that gives a command namespaces of its own; empty where that isn't permitted.

    As root, mmdebstrap mounts /proc, /sys and more in its caller's mount namespace, where they outlive it.
    """
    if os.geteuid() != 0:
        return ()
    try:
        run([*NAMESPACES, "true"])
    except (CommandFailed, EnvironmentMissing):
        return ()
    return NAMESPACES


@contextlib.contextmanager
def tree_directory(folder: Path) -> Iterator[Path]:
    """A directory for mmdebstrap's tree: `folder`, by a name that apt can handle (without quotation marks).

    Started by a user, mmdebstrap works under another user id, which can't reach below a directory that is
    closed to others, such as a home. Then it is one in the system's directory for temporary files.
    """
    with scratch() as place:
        for each in (place, folder):
            _drop_default_acl(each)
        if os.geteuid() != 0 and not all(above.stat().st_mode & 0o001 for above in folder.resolve().parents):
            yield place
            return
        alias = place / "rootfs"
        alias.symlink_to(folder, target_is_directory=True)
        yield alias


def _drop_default_acl(folder: Path) -> None:
    """Remove a folder's ACLs, so that what is made in it inherits none."""
    folder.chmod(0o755)  # apt's own user works in there
    for name in ("system.posix_acl_default", "system.posix_acl_access"):
        with contextlib.suppress(OSError):  # it has none
            os.removexattr(folder, name)


# ---- its output --------------------------------------------------------------------------------------------


def _notable(line: str) -> str | None:
    """What to print of a line of mmdebstrap's output without --verbose; None for nothing."""
    if absent := ABSENT.match(line):
        return f"warning: {absent[1]} of the catalog's `remove` isn't installed"
    return line if line.startswith(("I:", "E:", "W:")) else None


def bootstrap_error(error: CommandFailed, suite: str) -> ToolError:
    """The error for a failed mmdebstrap: the disk, the mirror, or the last lines of the output."""
    lines = [line for line in error.tail.splitlines() if not ROUTINE_LINE.match(line)]
    if "No space left" in error.tail:
        return EnvironmentMissing(
            f"disk full while making Debian {suite}",
            "free some space and run the same command again; temporary files go elsewhere with TMPDIR=DIR",
        )
    if unserved := next((line for line in lines if UNSERVED.match(line)), None):
        way_out = "see what apt says of its mirror: apt-get update"
        if UNSIGNED in unserved:  # as on Ubuntu, which doesn't have Debian's keys
            way_out = "install Debian's keys: apt-get install debian-archive-keyring"
        return SourceUnreachable(f"mmdebstrap can't make Debian {suite}: {unserved}", way_out)
    killed = error.code < 0 or KILLED in error.tail
    end = "was killed (is there enough memory?)" if killed else f"exited with {error.code}"
    return BuildFailed(
        "\n".join([f"mmdebstrap {end} while it made Debian {suite}:", *lines[-SHOWN_LINES:]]),
        f"see every line of it: {host_command()} build VARIANT --verbose",
    )


# ---- the tar: mmdebstrap's, without what is the host's -----------------------------------------------------


def write_clean_tar(raw: Path, clean: Path, *, cut: Sequence[str], begun: int, epoch: int) -> list[str]:
    """Write the root file system in the tar `raw`, without what the patterns of `cut` match.

    What was made since `begun`, or is newer than `epoch`, gets the time `epoch`. Returns the patterns of
    `cut` that match nothing. Raises DataError for a tar that isn't whole, OSError.
    """
    members = members_of(raw)
    unwanted = _matcher(*LEFT_OUT, *EMPTIED, *cut)
    idle = {pattern: _matcher(pattern) for pattern in cut}
    gone: dict[str, tarfile.TarInfo] = {}  # by path
    moved: dict[str, str] = {}  # the path of what is gone -> the hard link that holds its content now
    with open_source(raw) as (_, source), writing_tar(clean) as target:
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
            target.write(_header(info))
            if info.isreg():
                copy_range(source, target.fileno(), content.offset_data, n_bytes=info.size)
                target.write(bytes(-info.size % tarfile.BLOCKSIZE))
        for name in EMPTIED:
            empty = tarfile.TarInfo(f"./{name}")
            empty.mtime = epoch
            target.write(_header(empty))
    return list(idle)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _matcher(*patterns: str) -> re.Pattern[str]:
    """Matches the paths that one of the patterns matches, and all below them."""
    return re.compile("|".join(translate(text) for name in patterns for text in (name, f"{name}/*")))

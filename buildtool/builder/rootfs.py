"""Debian root file systems, made with mmdebstrap from the host's own mirror, kept by recipe in a cache.

Nothing of the host stays inside: apt sources, resolver, host name and logs are emptied.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from buildtool.command import CommandFailed, find, relay, run, run_loud
from buildtool.engine.provision import host_mirror
from buildtool.errors import EnvironmentMissing, SourceUnreachable
from buildtool.files import discard, kept, locked, replacing, require_sha256, scratch, sha256_of, write_text
from buildtool.model import Bootstrap
from buildtool.progress import Say

# Read by people, not by programs; licences (copyright files) stay, as Debian's policy asks.
DPKG_EXCLUDES = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*", "/usr/share/info/*")
DPKG_INCLUDES = ("/usr/share/doc/*/copyright",)
# Cut from the tree: headers, static libraries and CMake files come with some runtime packages' dependencies.
CUT = ("usr/include", "var/log", "var/cache/debconf", "var/cache/ldconfig")
EMPTIED = ("etc/resolv.conf", "etc/hostname", "etc/hosts", "etc/apt/sources.list", "etc/machine-id")

# The part of the host's environment that packages' scripts see: how to reach the mirror, no preferences.
FROM_HOST = ("PATH", "APT_CONFIG", "SSL_CERT_DIR", "SSL_CERT_FILE")
# The end of our process ends this one (--pdeathsig), which ends process 1 of the namespace and so all in it.
CONTAINER = (
    *("setpriv", "--pdeathsig=KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")  # in either case


# Runs in a shell on the host, so it holds no text of a catalog: names and patterns come in variables.
# It works from within the tree, because `find -path` would read a sign such as `[` in the way there as a
# pattern, and hides the variables from packages' scripts.
CUSTOMIZE = f"""set -eu
cd "$1"
remove=$WEIR_REMOVE cut=$WEIR_CUT
unset WEIR_REMOVE WEIR_CUT
set --
while IFS= read -r name; do
    [ -z "$name" ] || set -- "$@" "$name"
done <<END
$remove
END
[ $# -eq 0 ] || chroot . dpkg --purge --force-depends -- "$@"
find {" ".join(CUT)} -mindepth 1 -delete 2>/dev/null || true
set --
while IFS= read -r pattern; do
    [ -z "$pattern" ] || set -- "$@" -o -path "./$pattern"
done <<END
$cut
END
[ $# -eq 0 ] || {{ shift; find . -xdev \\( "$@" \\) -prune -exec rm -rf {{}} +; }}
find usr/lib -name "*.a" -delete
for file in {" ".join(EMPTIED)}; do : > "$file"; done
"""


def recipe_sha256(base: Bootstrap, epoch: int) -> str:
    """Name of the result in the cache: same recipe, same file."""
    asked = [base.suite, sorted(base.packages), sorted(base.remove), epoch, DPKG_EXCLUDES, CUT, EMPTIED, 3]
    asked += [sorted(base.cut)] if base.cut else []
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def mmdebstrap_command(base: Bootstrap, target: Path, mirror: str | None) -> list[str]:
    """The command line that makes a root file system, in the `environment` of its recipe. Pure."""
    doc = [f"--dpkgopt=path-exclude={p}" for p in DPKG_EXCLUDES] + [
        f"--dpkgopt=path-include={p}" for p in DPKG_INCLUDES
    ]
    return [
        "mmdebstrap",
        "--format=tar",
        "--variant=essential",
        f"--include={','.join(base.packages)}",
        *doc,
        f"--customize-hook={CUSTOMIZE}",
        "--",
        base.suite,
        str(target),
        *([mirror] if mirror else []),
    ]


def environment(base: Bootstrap, host: Mapping[str, str], epoch: int) -> dict[str, str]:
    """What a bootstrap runs in: CUSTOMIZE's data, and of the host's settings those that the tree can't show.

    Pure.
    """
    kept = {key: value for key, value in host.items() if key in FROM_HOST or key.lower() in PROXIES}
    # scripts of packages run Python: modules that they happen to load would leave bytecode
    fixed = {"HOME": "/root", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    recipe = {"WEIR_REMOVE": "\n".join(base.remove), "WEIR_CUT": "\n".join(base.cut)}
    return {**kept, **fixed, **recipe, "SOURCE_DATE_EPOCH": str(epoch)}


def _container() -> Sequence[str]:
    """The command prefix that gives a command its own namespaces; empty where that isn't permitted.

    Run by root, mmdebstrap mounts /proc, /sys and more in the namespace of its caller, where they outlive it.
    """
    if os.geteuid() != 0:
        return ()
    try:
        run([*CONTAINER, "true"])
    except (CommandFailed, EnvironmentMissing):
        return ()
    return CONTAINER


class RootfsCache:
    """Root file systems as plain tars, by recipe.

    When `verbose`, it prints every line of mmdebstrap's output.
    """

    def __init__(self, directory: Path, say: Say, *, verbose: bool = False) -> None:
        self._directory = directory
        self._say = say
        self._verbose = verbose

    def path(self, base: Bootstrap, epoch: int) -> Path:
        """Where the tar of this recipe is, or would be."""
        return self._directory / f"{base.suite}-{recipe_sha256(base, epoch)[:16]}.tar"

    def bring(self, base: Bootstrap, epoch: int) -> tuple[Path, str]:
        """The tar and its SHA-256, made if it isn't here.

        Raises EnvironmentMissing without mmdebstrap, SourceUnreachable when the mirror doesn't serve.
        """
        path = self.path(base, epoch)
        digest = path.with_suffix(".sha256")
        with locked(
            path.with_suffix(".lock"), lambda: self._say(f"{base.suite}: another build is making it")
        ):
            known = kept(digest, _hex_sha256)
            if known is None or not path.is_file():
                discard(digest)  # otherwise it would vouch for a different file
                if not path.is_file():
                    discard(path)
                self._make(base, path, epoch)
                known = sha256_of(path)
                write_text(digest, known)
            return path, known

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
        self._say(f"{base.suite}: making a root file system with mmdebstrap")
        with replacing(path) as partial, scratch(path.parent) as folder, _alias(folder) as named:
            folder.chmod(0o755)  # apt's own user works in there
            command = [*_container(), *mmdebstrap_command(base, partial, host_mirror())]
            try:
                run_loud(
                    command,
                    say=relay(
                        lambda line: self._say(f"{base.suite}: {line}"),
                        lambda line: line if line.startswith(("I:", "E:", "W:")) else None,
                        verbose=self._verbose,
                    ),
                    env={**environment(base, os.environ, epoch), "TMPDIR": str(named)},
                )
            except CommandFailed as error:
                if "No space left" in error.tail:
                    raise EnvironmentMissing(
                        f"disk full while making {path.name}",
                        "free some space and run the same command again",
                    ) from error
                raise SourceUnreachable(
                    f"mmdebstrap can't make Debian {base.suite}: {_reason(error)}"
                ) from error


def _hex_sha256(text: str) -> str:
    """The text, if it is a SHA-256. Raises ValueError."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("not a SHA-256")
    return text


@contextlib.contextmanager
def _alias(folder: Path) -> Iterator[Path]:
    """Another name for a directory, without signs of its path that apt can't handle: quotation marks."""
    with scratch() as place:
        place.chmod(0o755)  # apt's own user goes through it
        alias = place / "rootfs"
        alias.symlink_to(folder, target_is_directory=True)
        yield alias


def _reason(error: CommandFailed) -> str:
    """mmdebstrap's own error message among its last lines."""
    lines = error.tail.splitlines()
    return next(
        (line for line in lines if line.startswith("E:")), lines[-1] if lines else "it printed nothing"
    )

"""Runs an image's proof where no engine is: in podman, charliecloud or bubblewrap, whichever works first.

None of them needs a service or root. What a run unpacks is in a scratch directory, and gone afterwards.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from buildtool.build.layer_store import LayerStore
from buildtool.core.command import CommandFailed, find, run
from buildtool.core.errors import EnvironmentMissing
from buildtool.core.files import scratch
from buildtool.engine.client import RunResult
from buildtool.image.flatten import Entry, flattened, is_device, mode_of
from buildtool.image.written import WrittenImage

LIMIT_S = 600
USER = 10001
Words = Callable[[Path, Mapping[str, str]], list[str]]


def _podman(root: Path, env: Mapping[str, str]) -> list[str]:
    state = root.parent / "podman"  # it leaves nothing among the user's own images and containers
    words = ["podman", f"--root={state}/root", f"--runroot={state}/run", "run", "--rm", "--network=none"]
    words += ["--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    words += [f"--user={USER}:{USER}", "--log-driver=none", "--ulimit=host"]
    return [*words, *(f"--env={name}={text}" for name, text in env.items()), "--rootfs", str(root)]


def _charliecloud(root: Path, env: Mapping[str, str]) -> list[str]:
    own = [f"--set-env={name}={text}" for name, text in env.items()]
    return [
        "ch-run",
        "--unset-env=*",
        *own,
        "--private-tmp",
        f"--uid={USER}",
        f"--gid={USER}",
        str(root),
        "--",
    ]


def _bubblewrap(root: Path, env: Mapping[str, str]) -> list[str]:
    own = [word for name, text in env.items() for word in ("--setenv", name, text)]
    places = ["--ro-bind", str(root), "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    ids = ["--uid", str(USER), "--gid", str(USER)]
    return ["bwrap", "--unshare-all", "--die-with-parent", *ids, *places, "--clearenv", *own, "--"]


# program -> the words before a command that is to run in the files of an image
RUNTIMES: Mapping[str, Words] = {"podman": _podman, "ch-run": _charliecloud, "bwrap": _bubblewrap}
NEEDED = "no engine answers, and none of podman, charliecloud and bubblewrap works here"


class NoRuntime(EnvironmentMissing):
    """Nothing here can run an image."""


@dataclass(frozen=True)
class LocalRunner:
    """Runs a command in the files of images that were written here, by their digests."""

    images: Mapping[str, WrittenImage]
    store: LayerStore
    state: Path

    def run(self, ref: str, command: list[str]) -> RunResult:
        """Run it as the images' own user, with the image's environment, and /tmp alone to write into.

        Raises NoRuntime where nothing here can run it, DataError, and as `scratch` does.
        """
        if not any(map(find, RUNTIMES)):
            raise NoRuntime(NEEDED, "on Debian or Ubuntu: apt-get install bubblewrap")
        image = self.images[ref]
        variables = (json.loads(image.config).get("config") or {}).get("Env") or []
        env = dict(str(text).partition("=")[::2] for text in variables)
        with scratch(self.state) as folder:
            root = folder / "root"
            root.mkdir()
            unpack(image, self.store, root)
            for program, words in RUNTIMES.items():
                before = [*words(root, env)]
                if find(program) and _ran([*before, "true"]).exit_code == 0:
                    return _ran([*before, *command])
        raise NoRuntime(NEEDED, "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1")


def _ran(words: Sequence[str]) -> RunResult:
    user = {"USER": os.environ.get("USER") or "user"}  # which ch-run asks for
    try:
        done = run(
            ["env", *(f"{name}={text}" for name, text in user.items()), "timeout", str(LIMIT_S), *words]
        )
    except CommandFailed as error:
        return RunResult(error.code, "", error.tail)
    return RunResult(0, done.stdout, "")


def unpack(image: WrittenImage, store: LayerStore, root: Path) -> None:
    """Write an image's files below an empty directory, as this user's, without devices.

    Raises DataError for layers that can't be read, OSError.
    """
    for entry in flattened([partial(store.content, layer) for layer in image.layers]):
        if not is_device(entry.info):
            write_entry(entry, root)


def write_entry(entry: Entry, root: Path) -> None:
    """Write one member below `root`.

    No path in the tree leads through a link, so none leads out of `root`. Raises OSError.
    """
    info, path = entry.info, root / entry.info.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if info.isdir():
        path.mkdir(exist_ok=True)
        path.chmod(mode_of(info))
    elif info.issym():
        path.symlink_to(info.linkname)
    elif info.islnk():
        os.link(root / info.linkname, path, follow_symlinks=False)
    else:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for piece in entry.content:
                file.write(piece)
        path.chmod(mode_of(info))

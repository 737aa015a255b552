"""Images as one squashfs file, for enroot, charliecloud and other runtimes: `weir build --sqsh`."""

import io
import json
import os
import shlex
import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from buildtool.build.layer_store import LayerStore
from buildtool.core.command import CommandFailed, find, run_streaming
from buildtool.core.errors import BuildFailed, EnvironmentMissing
from buildtool.core.files import replacing
from buildtool.core.model import LABEL
from buildtool.core.progress import Progress
from buildtool.image.flatten import Entry, flattened, is_device, tar_chunks
from buildtool.image.written import WrittenImage
from probes.core.quoting import terminal

PROGRAM = "mksquashfs"
LEVEL = 3  # of zstd, in blocks of BLOCK_BYTES: as layers have it
BLOCK_BYTES = 1 << 20
# mounted by enroot when a container starts, where the host has them: it has no hook for AMD's cards
AMD_DEVICES = """\
/dev/kfd /dev/kfd none x-create=file,bind,rw,nosuid,noexec,nofail
/dev/dri /dev/dri none x-create=dir,rbind,rw,nosuid,noexec,nofail
"""
_RC_LOCAL = "# /etc/rc reads this when a container starts; it can change the arguments of what is started\n"


def require_program() -> None:
    """Raise EnvironmentMissing where squashfs-tools aren't there, or too old to read a tar."""
    if not find(PROGRAM):
        raise EnvironmentMissing(
            f"`{PROGRAM}`, which writes squashfs files, isn't installed",
            "on Debian or Ubuntu: apt-get install squashfs-tools (4.5 or newer)",
        )


def write_squashfs(
    image: WrittenImage, target: Path, *, store: LayerStore, epoch: int, progress: Progress
) -> None:
    """Write an image's files, and what enroot reads to start it, as one file, whole or not at all.

    Everything belongs to root, and devices stay out: a runtime brings its own. The same image gives the same
    bytes. Raises EnvironmentMissing for a full disk or a missing program, BuildFailed, DataError.
    """
    require_program()
    options = ["-comp", "zstd", "-Xcompression-level", str(LEVEL), "-b", str(BLOCK_BYTES), "-all-root"]
    options += ["-root-mode", "755", "-no-progress", "-quiet", "-exit-on-error", "-noappend"]
    with replacing(target) as partial_file:
        try:
            run_streaming(
                [PROGRAM, "-", str(partial_file), "-tar", *options],
                progress=lambda line: progress(f"{PROGRAM}: {line}"),
                # times of the file system and its root; with -root-time, 4.5.1 takes now for tars
                env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
                stdin=tar_chunks(entries(image, store, epoch)),
            )
        except CommandFailed as error:
            if "No space left" in error.tail:
                raise EnvironmentMissing(
                    f"the disk filled up while writing {target}", "free some space"
                ) from error
            raise BuildFailed(f"{PROGRAM} can't write {target}:\n{error.tail}") from error


def entries(image: WrittenImage, store: LayerStore, epoch: int) -> Iterator[Entry]:
    """The members of an image's tree without devices, then what enroot reads."""
    config = json.loads(image.config).get("config") or {}
    own = enroot_files(config)
    layers: list[Callable[[], Iterator[bytes]]] = [partial(store.content, layer) for layer in image.layers]
    for entry in flattened(layers):
        if entry.info.name not in own and not is_device(entry.info):
            yield entry
    for path, content in own.items():
        info = tarfile.TarInfo(path)
        info.size, info.mtime, info.mode = len(content), epoch, 0o644
        yield Entry(info, iter([content]))


def enroot_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files by which enroot starts an image, by path, from the image's configuration.

    As enroot makes them of an image from a registry (its src/docker.sh): the environment, and a script that
    changes to the working directory and starts what is to be started. An image for AMD's cards gets the
    host's devices for them by /etc/fstab, which enroot reads (its doc/image-format.md).
    """
    environment = [text for text in config.get("Env") or [] if "\n" not in text]
    words = [str(word) for word in config.get("Entrypoint") or []]
    command = [str(word) for word in config.get("Cmd") or []]
    if not words and not command:
        command = ["/bin/sh"]
    folder = shlex.quote(str(config.get("WorkingDir") or "/"))
    said = config.get("Labels") or {}
    cards = str(said.get(f"{LABEL}.gpu-targets") or "").split(",")
    is_for_amd = said.get(f"{LABEL}.torch.build") == "rocm" or any(card.startswith("gfx") for card in cards)
    labels = [f"# {terminal(f'{key} {text}')}" for key, text in sorted(said.items())]
    out = io.StringIO()
    out.write("".join(f"{line}\n" for line in labels))
    out.write(f"\nmkdir -p {folder} 2> /dev/null\ncd {folder} && unset OLDPWD || exit 1\n")
    out.write("\nif [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n")
    out.write(f'\nif [ $# -gt 0 ]; then\n    exec {shlex.join(words)} "$@"\n')
    out.write(f"else\n    exec {shlex.join([*words, *command])}\nfi\n")
    mounts = {"etc/fstab": AMD_DEVICES.encode()} if is_for_amd else {}
    return {
        **mounts,
        "etc/environment": "".join(f"{text}\n" for text in environment).encode(),
        "etc/rc": out.getvalue().encode(),
        "etc/rc.local": _RC_LOCAL.encode(),
    }

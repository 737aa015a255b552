"""Runs inside a container, beside its program: prints which files are opened, by inotify(7).

For where fanotify is refused: this needs no rights on the host, and works through any engine. The image
needs Python with ctypes, in which this runs as root. Only files count that are there when the watch begins.

Prints a JSON text a line: first the number of directories that are watched, then each path once. Once the
file END is there, which the gate makes after its program's end, an empty text says that everything was
printed. Standard library alone.
"""

import ctypes
import json
import os
import select
import struct
from collections.abc import Iterator

IN_OPEN, IN_Q_OVERFLOW, IN_ISDIR = 0x20, 0x4000, 0x40000000
END = "/dev/shm/.weir-observed"
EVENT = struct.Struct("iIII")


def say(value: object) -> None:
    """Print a value."""
    os.write(1, json.dumps(value).encode() + b"\n")


def main() -> None:
    """Watch every directory of the root's file system until END is there."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    root = os.lstat(b"/").st_dev
    places: dict[int, bytes] = {}
    there: set[bytes] = set()
    for folder, folders, names in os.walk(b"/"):
        there.update(folder.rstrip(b"/") + b"/" + name for name in names)
        folders[:] = [name for name in folders if _device(folder, name) == root]
        number = libc.inotify_add_watch(descriptor, folder, IN_OPEN)
        if number < 0:
            say({"error": os.strerror(ctypes.get_errno()), "place": os.fsdecode(folder)})
            return
        places[number] = folder
    say(len(places))
    while True:
        ended = os.access(END, os.F_OK)
        while select.select([descriptor], [], [], 0 if ended else 0.2)[0]:
            for number, mask, name in _events(os.read(descriptor, 1 << 16)):
                if mask & IN_Q_OVERFLOW:
                    say({"error": "the kernel's queue was full", "place": "fs.inotify.max_queued_events"})
                    return
                path = places[number].rstrip(b"/") + b"/" + name
                if not mask & IN_ISDIR and path in there:
                    there.remove(path)
                    say(os.fsdecode(path))
        if ended:
            say("")
            return


def _events(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while at < len(data):
        number, mask, _, length = EVENT.unpack_from(data, at)
        at += EVENT.size
        yield number, mask, data[at : at + length].rstrip(b"\0")
        at += length


def _device(folder: bytes, name: bytes) -> int:
    try:
        return os.lstat(folder + b"/" + name).st_dev
    except OSError:
        return -1


if __name__ == "__main__":
    main()

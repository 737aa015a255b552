"""Which files of a container's root are opened, by fanotify(7), from the engine's host and as root.

Only files count that are there when the watch begins: others are the container's own, and go with it.
"""

import ctypes
import os
import select
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_INIT = 0x1 | 0x10 | 0x20  # FAN_CLOEXEC, FAN_UNLIMITED_QUEUE, FAN_UNLIMITED_MARKS
_MARK = 0x1 | 0x10  # FAN_MARK_ADD, FAN_MARK_MOUNT
_OPENED = 0x20 | 0x1000  # FAN_OPEN, FAN_OPEN_EXEC
_OVERFLOW = 0x4000
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")  # fanotify_event_metadata
_READ_BYTES = 64 << 10
_POLL_S = 0.2
STARTS_WITHIN_S = 10.0  # of the engine's word that it runs


class Fanotify:
    """Collects the paths that are opened in the file system of a container's root until `finish`.

    Raises OSError where the kernel refuses: EPERM for all but root.
    """

    def __init__(self, pid: int) -> None:
        self._paths: set[str] = set()
        self._fault = ""
        self._ended = threading.Event()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fanotify_mark.argtypes = (
            ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p,
        )  # fmt: skip
        self._descriptor = libc.fanotify_init(
            _INIT, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_LARGEFILE", 0)
        )
        if self._descriptor < 0:
            raise _error("fanotify_init")
        root = f"/proc/{pid}/root".encode()
        try:
            self._files = frozenset(_files_below(root))
            if libc.fanotify_mark(self._descriptor, _MARK, _OPENED, _AT_FDCWD, root):
                raise _error("fanotify_mark")
        except OSError:
            os.close(self._descriptor)
            raise
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while True:
            last = self._ended.is_set()  # asked for before the queue is looked at
            while poll.poll(0 if last else _POLL_S * 1000):
                try:
                    self._read(os.read(self._descriptor, _READ_BYTES))
                except OSError as error:  # such as EMFILE, for an event's descriptor
                    self._fault = str(error)
            if last:
                return

    def _read(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            length, _version, _, _, mask, descriptor, _pid = _EVENT.unpack_from(data, at)
            at += length
            if mask & _OVERFLOW or descriptor < 0:
                self._fault = "the kernel's queue was full"
                continue
            try:
                self._paths.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            except OSError as error:  # the others of the buffer have descriptors, too
                self._fault = str(error)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Watch no longer; again, it does nothing."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            os.close(self._descriptor)

    def finish(self) -> frozenset[str]:
        """The paths, from the container's root. Raises OSError if events were lost."""
        self.close()
        if self._fault:
            raise OSError(f"events were lost: {self._fault}")
        # a file that was removed before its event was read
        removed = {path.removesuffix(" (deleted)") for path in self._paths}
        return self._files & (self._paths | removed)


def _files_below(root: bytes) -> Iterator[str]:
    """The paths in a root's own file system, without what is mounted there."""
    device = os.lstat(root + b"/").st_dev
    for folder, folders, names in os.walk(root + b"/"):
        folders[:] = [name for name in folders if os.lstat(folder + b"/" + name).st_dev == device]
        inside = folder[len(root) :].strip(b"/")
        for name in names:
            yield os.fsdecode(b"/" + inside + b"/" + name if inside else b"/" + name)


def is_local(pid: int, gate: str) -> bool:
    """Whether a container's first process is this host's, and not that of another machine with an engine.

    The engine may say that it runs while it is still the runtime's `runc init`: that is waited for.
    """
    ends = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        if gate.encode() in words:
            return True
        if words[1:2] not in ([b"init"], []) or time.monotonic() > ends:
            return False
        time.sleep(0.01)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")

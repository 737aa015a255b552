"""One run at a time on a GPU: an advisory lock on a file named after its PCI id."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from probes.errors import DeviceBusy
from probes.records.reportfiles import writing
from probes.records.schema import WRITABLE
from probes.shared.locks import lock_now


@contextmanager
def gpu_lock(folder: Path, pci_id: str) -> Iterator[None]:
    """Hold the GPU's lock in a folder that all runs share (the reports', also when they are in containers).

    The kernel releases it no matter how the holder ends. Raises DeviceBusy when another run holds it,
    ReportError when the folder can't be written.
    """
    path = folder / f".gpu-{pci_id.replace(':', '-')}.lock"
    busy = DeviceBusy(f"another run is measuring GPU {pci_id}", f"wait for it to end (it holds {path})")
    # reading is enough for flock, so that another user's file will do
    with held(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644, busy=busy):
        yield


@contextmanager
def held(path: Path, flags: int, mode: int, *, busy: DeviceBusy) -> Iterator[int]:
    """An open and locked file, in a folder that is made if need be. Raises `busy` or ReportError."""
    with writing(path, WRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, mode)
    try:
        if not lock_now(descriptor):
            raise busy
        yield descriptor
    finally:
        os.close(descriptor)

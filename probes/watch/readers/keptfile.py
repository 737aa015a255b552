"""Files of the kernel that are read often: opened once, read at their beginning each time."""

import os
import re
from pathlib import Path

from probes.shared.unknown import Unknown

_NUMBER = re.compile(r"-?[0-9]{1,20}")  # what 64 bits hold
MOST_BYTES = 1 << 16  # of one file: /proc/stat of a large machine


class KeptFile:
    """A file that stays open. When it fails it is opened again at the next reading."""

    def __init__(self, path: Path, *, most_bytes: int = 4096) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._descriptor = -1

    def read(self) -> bytes | Unknown:
        """The content at this moment, or why it can't be read (the device is gone: ENODEV)."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            return os.pread(self._descriptor, self._most_bytes, 0)
        except OSError as error:
            self.close()
            missing = isinstance(error, FileNotFoundError)
            return Unknown(
                f"no {self._path.name} here" if missing else f"{self._path.name}: {error.strerror}"
            )

    def text(self) -> str | Unknown:
        """The content as text."""
        data = self.read()
        return data if isinstance(data, Unknown) else data.decode("utf-8", "replace").strip()

    def number(self) -> int | Unknown:
        """The number in a file of one decimal figure."""
        text = self.text()
        if isinstance(text, Unknown):
            return text
        if _NUMBER.fullmatch(text):
            return int(text)
        return Unknown(f"{self._path.name} says {text[:40]!r}")

    def scaled(self, factor: float) -> float | Unknown:
        """The same in another unit."""
        number = self.number()
        return number if isinstance(number, Unknown) else number * factor

    def close(self) -> None:
        """Close the file; the next reading opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

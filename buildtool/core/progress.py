"""Progress of long work on standard error: one line per step, and a sign of life where a step is silent."""

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from probes.core.quoting import log_text

Progress = Callable[[str], None]  # shows one line of progress
SILENCE_S = 10.0  # after this long without a line, print what is still running


class ProgressLog:
    """Writes lines with the seconds since the start; as a context manager, it also breaks long silences."""

    def __init__(self, *, silence_s: float = SILENCE_S, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._begun = self._written = time.monotonic()
        self._last = "starting"
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._begun

    def line(self, line: str) -> None:
        """One line of progress, from any thread."""
        with self._lock:
            self._last = line
            self._write(line)

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:  # a line that is being written comes before the end
            self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(self._silence_s / 4):
            with self._lock:
                silent_s = time.monotonic() - self._written
                if silent_s >= self._silence_s and not self._done.is_set():
                    self._write(f"... still at it after: {self._last[:100]}")

    def _write(self, line: str) -> None:
        self._written = time.monotonic()
        shown = log_text(line, keep="\t")
        self._stream.write(f"[{self.seconds:6.1f}s] {shown}\n")
        self._stream.flush()

"""What the service logs, for tests. pytest's own fixture needs a plugin that slows every other test down."""

import logging


class Logged(logging.Handler):
    """Keeps every line as it is formatted."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

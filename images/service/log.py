"""The log: one JSON object a line, with the ids of the request that a line belongs to."""

import json
import logging
from datetime import UTC, datetime

from service.web.tracing import CURRENT


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON; `extra={"data": {...}}` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": at, "level": record.levelname, "message": record.getMessage()}
        if trace := CURRENT.get():
            line |= trace.fields
        line |= getattr(record, "data", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)

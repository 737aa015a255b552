"""Which request a log line belongs to: its id, and the W3C trace that a caller passes on."""

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True)
class Trace:
    """One request's ids. `parent` is the caller's span, if it sent one."""

    request_id: str
    trace_id: str
    span_id: str
    parent: str = ""
    flags: str = "00"

    @property
    def traceparent(self) -> str:
        """The header that passes the trace on, with this service's span as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def fields(self) -> dict[str, str]:
        """What a log line holds of it."""
        parent = {"parent_span_id": self.parent} if self.parent else {}
        return {"request_id": self.request_id, "trace_id": self.trace_id, "span_id": self.span_id, **parent}


CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def begin(request_id: str, traceparent: str) -> Trace:
    """The trace of a request with these headers (empty where absent). What isn't well-formed is made new."""
    found = _PARENT.fullmatch(traceparent.strip())
    span_id = secrets.token_hex(8)
    name = request_id if _ID.fullmatch(request_id) else secrets.token_hex(8)
    if found is None or set(found[1]) == {"0"} or set(found[2]) == {"0"}:
        return Trace(name, secrets.token_hex(16), span_id)
    return Trace(name, found[1], span_id, parent=found[2], flags=found[3])

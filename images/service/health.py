"""The image's HEALTHCHECK: `python3 -m service.health` exits 0 when the service answers that it is ready,
else 1.

It runs every few seconds, so it imports little, and only of the standard library.
"""

import os
import socket
import sys

from service.errors import SettingsError
from service.listen import DEFAULT_LISTEN, parse_listen

TIMEOUT_S = 3.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a socket bound to every address can be reached


def status(host: str, port: int) -> str:
    """Return the status line of GET /v2/health/ready. Raises OSError without an answer in time."""
    with socket.create_connection((_ANY.get(host, host), port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connection.makefile("rb").readline().decode("ascii", "replace").strip()


def is_ready(status_line: str) -> bool:
    """Return whether an HTTP status line has the status 200."""
    return status_line.split(" ")[1:2] == ["200"]


def main() -> int:
    """Ask the service; write to stderr why it isn't ready (`docker inspect` shows that)."""
    try:
        answer = status(*parse_listen(os.environ.get("WEIR_LISTEN") or DEFAULT_LISTEN))
    except (OSError, SettingsError) as error:
        answer = f"no answer: {error}"
    if is_ready(answer):
        return 0
    sys.stderr.write(f"not ready: {answer}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())

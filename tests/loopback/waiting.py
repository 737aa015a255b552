"""What tests wait for is a state, however long a busy machine takes, and a port stays free meanwhile."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

PATIENCE_S = 60.0  # where nothing is measured


def until(true: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Return once it is true, or fail."""
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)


@contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports of 127.0.0.1 to listen on in this block: bound all the while, so that nobody else gets them."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in made:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server may bind it as well
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in made]

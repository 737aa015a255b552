"""Ports for programs that can't be told to take any: nobody else is given one before the program has it."""

import random
import socket
from pathlib import Path

LOWEST = 10_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on, below those that are given to connections and servers."""
    end = max(int(RANGE.read_text().split()[0]), LOWEST + 1000)
    for port in random.sample(range(LOWEST, end), 100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("100 ports were taken")

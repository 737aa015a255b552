"""A unit test that starts a process or opens a connection fails."""

import socket
import subprocess

import pytest


def test_a_unit_test_reaches_nothing_outside_its_process() -> None:
    with pytest.raises(AssertionError, match="tried to reach outside"):
        subprocess.run(["true"], check=True)
    with socket.socket() as made, pytest.raises(AssertionError, match="tried to reach outside"):
        made.connect(("127.0.0.1", 1))

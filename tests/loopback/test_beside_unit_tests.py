"""What unit tests may not do, tests of other kinds may: also in one process with them, and after them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_walls_of_unit_tests_stand_around_unit_tests_alone() -> None:
    """The gRPC tests hung where unit tests had run before them: what stops the server couldn't connect."""
    files = ["tests/unit/test_sandbox.py", "tests/loopback/test_service_sockets.py"]
    one = "slow_bodies or nothing_outside"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", one]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_an_audit_of_a_file_waits_for_no_client_of_the_engine() -> None:
    code = "import buildtool.cli.audit, sys; print({'docker', 'requests'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"

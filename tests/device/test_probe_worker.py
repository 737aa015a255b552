"""The watcher of workers, against real processes that crash, babble, hang and lie. Needs no torch."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from probes.core.codec import encode
from probes.measure import probe_worker, supervisor
from probes.measure.probe_worker import Job, Line
from probes.records.rows import Gap
from probes.records.schema import Done, Failed, Settings

JOB = Job("transfer", Settings(quick=True, seed=1, vram_cap_bytes=None), None)
GAP = Gap("h2d_pinned", 4096, "a test")


def says(body: str) -> Callable[[int], Sequence[str]]:
    """A worker that runs `body`, with `out` for the pipe and the lines of a record and of the end."""
    record, done = (json.dumps(encode(Line(message))) for message in (GAP, Done()))
    head = f"import os, signal, sys, time\nrecord, done = {record!r} + chr(10), {done!r} + chr(10)\n"
    opened = "out = open(int(sys.argv[1]), 'w', buffering=1)\n"
    return lambda fd: [sys.executable, "-c", head + opened + textwrap.dedent(body), str(fd)]


def run(body: str, *, limit_s: float = 20.0) -> supervisor.JobResult:
    return probe_worker.run_job(
        JOB, limit_s=limit_s, on_record=lambda _: None, command=says(body), grace_s=0.5
    )


def failure(ended: supervisor.JobResult) -> Failed:
    assert isinstance(ended.outcome, Failed), ended
    return ended.outcome


def test_records_arrive_and_the_end_is_heard() -> None:
    ended = run("out.write(record * 3 + done)")
    assert ended.outcome == Done()
    assert ended.records == (GAP,) * 3


def test_a_crash_keeps_what_was_measured_and_names_the_signal() -> None:
    ended = run(
        "out.write(record)\nprint('the library said this', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert ended.records == (GAP,)
    assert "SIGSEGV" in failure(ended).reason
    assert "the library said this" in failure(ended).hint


def test_a_silent_exit_is_a_failure() -> None:
    assert "exited with code 0" in failure(run("out.write(record)")).reason
    assert "exited with code 3" in failure(run("sys.exit(3)")).reason


@pytest.mark.parametrize("noise", ["not json", "[1, 2", '{"message": {"is": "nonsense"}}', "\\x00\\xff"])
def test_garbage_ends_the_worker_and_is_quoted(noise: str) -> None:
    ended = run(f"out.write(record + {noise!r} + chr(10))\ntime.sleep(60)")
    assert "unreadable" in failure(ended).reason
    assert ended.records == (GAP,)
    assert ended.seconds < 10


def test_a_hang_is_ended_in_time() -> None:
    ended = run("out.write(record)\ntime.sleep(60)", limit_s=1.0)
    assert "no end within" in failure(ended).reason
    assert ended.records == (GAP,)
    assert ended.seconds < 5


def test_one_that_ignores_sigterm_is_killed() -> None:
    ended = run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nout.write(record)\ntime.sleep(60)", limit_s=1.0
    )
    assert not failure(ended).wedged
    assert ended.seconds < 5


def test_one_that_closes_its_pipe_and_lingers_is_ended() -> None:
    ended = run(
        "out.write(record + done)\nout.close()\nsys.stdout.close()\nos.close(1); os.close(2)\ntime.sleep(60)"
    )
    assert ended.outcome == Done()
    assert ended.seconds < 5


def test_a_flood_on_stdout_does_not_block_the_worker() -> None:
    ended = run("print('y' * 10_000_000)\nout.write(record + done)")
    assert ended.outcome == Done()


def test_a_worker_dies_with_its_parent() -> None:
    """The parent is killed; the child, which had asked for it, must not outlive it."""
    child = (
        "import os, sys, time; from probes.measure.worker import die_with; die_with(int(sys.argv[1]));"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import os,subprocess,sys; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_an_interrupt_ends_the_worker_and_keeps_its_records() -> None:
    def interrupt(record: object) -> None:
        raise KeyboardInterrupt

    ended = probe_worker.run_job(
        JOB, limit_s=20, on_record=interrupt, command=says("out.write(record)\ntime.sleep(60)"), grace_s=0.5
    )
    assert failure(ended).exit_code == 130
    assert ended.records == (GAP,)
    assert ended.seconds < 5

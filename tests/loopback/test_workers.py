"""Real workers of the probes, started from directories with names that Python would take for modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from buildtool.build import wheels
from probes.measure import in_turns as inturns
from probes.measure import supervisor, this_machine
from probes.measure.probe_worker import Job
from probes.records.facts import TorchFacts
from probes.records.schema import Done, Failed

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["json.py", "probes/__init__.py"])
def test_a_worker_imports_nothing_from_the_current_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('a module of the user')")
    found = subprocess.run(
        [sys.executable, "-P", "-m", "probes", "machine"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "the worker exited" not in found.stdout


def test_pip_is_not_taken_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('a module of the user')")
    monkeypatch.chdir(tmp_path)
    assert "PIP_CONFIG_FILE" in wheels._connection_settings()


@pytest.mark.parametrize("program", ["buildtool.cli.program", "probes.__main__"])
def test_little_is_imported_before_an_interrupt_is_a_message(program: str) -> None:
    count = "import sys; before = set(sys.modules); import {}; print(*set(sys.modules) - before)"
    found = subprocess.run(
        [sys.executable, "-S", "-c", count.format(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not {"importlib.metadata", "zipfile"} & set(found.stdout.split())


COUNTS_AND_ENDS = """
import atexit, gc, sys
from probes.records.schema import Failed
from probes.measure import worker as child
from probes.measure.probe_worker import Job
def messages(job, tell):
    yield Failed(str(gc.get_freeze_count()), "", 4, wedged=False)
atexit.register(print, "the end of a library")
child.exit_now(child.work(sys.argv[1:], Job, messages, preload=lambda: print("said")))
"""


def test_a_worker_loses_no_time_in_collections_nor_in_the_end_of_its_libraries() -> None:
    """Seen with two busy cores: 0.15 s for each buffer's collection, and 2 s for torch's own end."""
    ended = supervisor.start(lambda fd: [sys.executable, "-c", COUNTS_AND_ENDS, str(fd), str(os.getpid())])
    told, _ = ended.process.communicate(b'{"probe": "transfer"}\n', timeout=PATIENCE_S)
    with os.fdopen(ended.pipe) as pipe:
        frozen = int(json.loads(pipe.read())["message"]["reason"])
    assert frozen > 1000, "what the imports have left is looked at again and again"
    assert (ended.process.returncode, told) == (0, b"said\n")


STANDS_IN = """
import json, os, sys
out = os.fdopen(int(sys.argv[1]), "w")
log, name, dies = sys.argv[3:]
sys.stdin.readline()
for number in range(4):
    print(json.dumps({"message": {"is": "turn"}}), file=out, flush=True)
    sys.stdin.readline()
    with open(log, "a") as file:
        file.write(name)
    if dies == str(number):
        os.kill(os.getpid(), 9)
print(json.dumps({"message": {"is": "done"}}), file=out, flush=True)
"""


def in_turns(log: Path, dies: tuple[str, str] = ("", "")) -> tuple[object, ...]:
    """How two stand-ins ended that measured in turns; each `dies` after that many."""

    def side(number: int) -> inturns.Side:
        def command(descriptor: int) -> list[str]:
            words = [str(descriptor), str(os.getpid()), str(log), "ab"[number], dies[number]]
            return [sys.executable, "-c", STANDS_IN, *words]

        return inturns.Side(Job("transfer"), command, lambda _: None)

    found = inturns.run_both((side(0), side(1)), first=1, limit_s=PATIENCE_S)
    return tuple(one.outcome for one in found)


def test_two_processes_measure_in_turns(tmp_path: Path) -> None:
    assert in_turns(tmp_path / "log") == (Done(), Done())
    assert (tmp_path / "log").read_text() == "babababa"


def test_of_two_processes_in_turns_one_that_dies_keeps_the_other_from_nothing(tmp_path: Path) -> None:
    killed, whole = in_turns(tmp_path / "log", ("1", ""))
    assert isinstance(killed, Failed)
    assert whole == Done()
    assert (tmp_path / "log").read_text() == "bababb"


def test_an_interrupt_ends_both_processes_of_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[supervisor.WorkerProcess] = []
    start = supervisor.start
    monkeypatch.setattr(supervisor, "start", lambda command: begun.append(start(command)) or begun[-1])

    def interrupted(_running: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inturns, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_turns(tmp_path / "log")
    assert len(begun) == 2
    assert all(one.process.poll() is not None for one in begun)


def test_a_worker_runs_in_another_python_with_this_program_alone() -> None:
    facts = this_machine.describe(inturns.python_command(Path(sys.executable))).torch
    assert isinstance(facts, TorchFacts) or facts.reason.startswith("torch can't be imported")

"""Whether a probe run can be trusted: misbehaving workers, SIGKILL at random moments, odd machines.

Run by `make bench-probes`; needs neither torch nor a GPU. The workers are small programs with cases of a
millisecond; everything above them is the real thing. Prints one JSON line a bar; exit code 1 for a miss.
"""

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "probes"))
sys.path.append(str(Path(__file__).parents[1] / "unit" / "probes" / "hardware"))
import test_probe_trees
from board import Board, tell

from probes.core.codec import encode
from probes.core.errors import ReportError
from probes.core.unknown import Unknown
from probes.measure import catalog, journal, probe_worker, session
from probes.measure.probe_worker import Job, Line
from probes.records.facts import Gpu, TorchFacts
from probes.records.rows import Gap, Measurement
from probes.records.schema import Done, Failed, Settings, read_report

KILLS = 1000
HANGS, CRASHES = 50, 100
LIMIT_S, GRACE_S = 1.0, 0.1
CRASH_LIMIT_S = 10.0  # they end by themselves, also on a machine that is busy
CASES = 6  # of each probe
PROBES = ("transfer", "breakeven")
SETTINGS = Settings(quick=True, seed=1, vram_cap_bytes=None)
GPU = Gpu("made up", "sm_90", "0000:03:00.0", 2**34, 2**34, Unknown("made up"), False)
FACTS = TorchFacts("2.11.0", "cuda", "13.0", 2, (GPU,), "")

HEAD = "import json, os, signal, sys, time\nout = open(int(sys.argv[1]), 'w', buffering=1)\n"
# dies with its parent as the real one does (prctl 1 is PR_SET_PDEATHSIG)
WORKER = """
import ctypes
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[2]): sys.exit(1)
job = json.loads(sys.stdin.readline())
facts, row, done = (line + chr(10) for line in sys.argv[3].split(chr(10)))
if job['probe'] == 'describe':
    out.write(facts)
else:
    log = os.open(sys.argv[4], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for size in range(1, CASES + 1):
        if f'row {size}' not in job['done']:
            time.sleep(0.001)
            os.write(log, f"{job['probe']} {size}\\n".encode())
            out.write(row.replace('424242', str(size)))
            if not sys.stdin.readline(): sys.exit(1)
out.write(done)
"""
ROW = Measurement("row", 424242, 1, 1, "wall", Unknown("made up"), (0.001, 0.001))


def python(body: str, *args: str) -> Callable[[int], Sequence[str]]:
    """A worker program; -I -S keeps its start to a few milliseconds."""
    return lambda fd: [sys.executable, "-I", "-S", "-c", HEAD + body, str(fd), *args]


HANGING = (
    "time.sleep(60)",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)",
    "out.write(record)\nwhile True: pass",
    "os.close(1); os.close(2)\ntime.sleep(60)",
    "out.write(record[:20])\nout.flush()\ntime.sleep(60)",
)
CRASHING = (
    "out.write(record)\nos.kill(os.getpid(), signal.SIGSEGV)",
    "os.abort()",
    "sys.exit(3)",
    "out.write(record)\nsys.exit(0)",
    "raise MemoryError",
    "out.write('not json' + chr(10))\ntime.sleep(60)",
    "out.write(record[:-9] + chr(10))",
    "out.write(json.dumps({'message': {'is': 'nonsense'}}) + chr(10))",
    "os.write(out.fileno(), os.urandom(4096) + b'\\n')",
    "os.kill(os.getpid(), signal.SIGKILL)",
)


def misbehave(
    board: Board, what: str, bodies: Sequence[str], *, count: int, limit_s: float, within_s: float
) -> None:
    """Run each program in turn; every one must end as a failure, `within_s`, its records kept."""
    told = [json.dumps(encode(Line(message))) + "\n" for message in (Gap("x", 1, "kept"), Done())]
    intro = f"record, done = {told[0]!r}, {told[1]!r}\n"
    recorded, longest, kept = 0, 0.0, 0
    for turn in range(count):
        body = bodies[turn % len(bodies)]
        ended = probe_worker.run_job(
            Job("transfer", SETTINGS, None),
            limit_s=limit_s,
            on_record=lambda _: None,
            command=python(intro + body),
            grace_s=GRACE_S,
        )
        recorded += isinstance(ended.outcome, Failed) and bool(ended.outcome.reason)
        kept += len(ended.records) == body.count("write(record)")
        longest = max(longest, ended.seconds)
    board.bar(
        f"{what}: recorded as failures", recorded, count, unit="workers", at_least=True, kinds=len(bodies)
    )
    board.bar(f"{what}: records kept as written", kept, count, unit="workers", at_least=True)
    board.bar(f"{what}: longest", longest, within_s, unit="s", time_limit_s=limit_s)


class Killing:
    """Runs in a folder, killed at random moments and taken up again until they are done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder.with_name("executions")
        lines = [json.dumps(encode(Line(message))) for message in (FACTS, ROW, Done())]
        body = WORKER.replace("CASES", str(CASES))
        self.body, self.lines = body, "\n".join(lines)
        self.unreadable = self.orphans = self.lost = self.doubled = 0
        self.finished = self.most_repeated = 0
        self.repeated = 0

    def command(self, descriptor: int) -> Sequence[str]:
        """The worker's, asked for by the process that is to be its parent."""
        return python(self.body, str(os.getpid()), self.lines, str(self.log))(descriptor)

    def start(self) -> int:
        """Fork a run: a new one, or the unfinished one of the folder taken up."""
        begun = [path for path in self.folder.glob("*.journal") if b"\n" in path.read_bytes()]
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            probe_worker.run_job = partial(probe_worker.run_job, command=self.command)  # type: ignore[assignment]
            silent = session.Listener()
            if begun:
                session.resume(begun[0], listener=silent)
            else:
                session.measure(catalog.select(PROBES), SETTINGS, folder=self.folder, listener=silent)
            code = 0
        finally:
            os._exit(code)

    def executed(self) -> int:
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def kept(self) -> int:
        """Cases that a report or a journal holds."""
        names = {path.with_name(journal.report_of(path).name) for path in self.folder.glob("[!.]*.json*")}
        total = 0
        for path in names:
            found = set()
            if journal.path_of(path).exists() and (past := journal.read(path)):
                found |= {(entry.probe, entry.record.case) for entry in past.entries}
            if path.exists():
                found |= {
                    (run.probe, record.case) for run in read_report(path).runs for record in run.records
                }
            total += len(found)
        return total

    def after_a_kill(self) -> None:
        """What must hold whenever it fell."""
        try:
            again = self.executed() - self.kept() - self.repeated
        except ReportError as error:
            self.unreadable += 1
            print(error, file=sys.stderr)
            return
        self.repeated += again
        self.most_repeated = max(self.most_repeated, again)

    def after_the_end(self) -> None:
        """Finished runs leave reports with every case once, and nothing else.

        There is more than one when a kill fell after the last line of the one before.
        """
        reports = list(self.folder.glob("*.json"))
        for report in reports:
            cases = [(run.probe, record.case) for run in read_report(report).runs for record in run.records]
            self.lost += len(PROBES) * CASES - len(set(cases))
            self.doubled += len(cases) - len(set(cases))
        self.orphans += sum(1 for path in self.folder.iterdir() if path.suffix not in (".json", ".lock"))
        self.finished += 1
        for path in (*reports, self.log):
            path.unlink(missing_ok=True)
        self.repeated = 0


def clean_run_s(state: Killing) -> float:
    """How long a run takes that nobody kills."""
    began_s = time.monotonic()
    os.waitpid(state.start(), 0)
    took_s = time.monotonic() - began_s
    state.after_the_end()
    return took_s


def kill_at_random(board: Board, folder: Path, kills: int) -> None:
    draw = random.Random(20)
    state = Killing(folder)
    whole_s = statistics.median(clean_run_s(state) for _ in range(5))
    tell(f"an undisturbed run takes {whole_s:.3f} s; {kills} kills fall anywhere within one")
    done = 0
    while done < kills:
        child = state.start()
        time.sleep(draw.uniform(0, whole_s))
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            time.sleep(0.002)  # the worker dies too
            done += 1
            state.after_a_kill()
            if done % 100 == 0:
                tell(f"{done} kills, {state.finished} runs came to their end all the same")
        elif status:
            board.bar("a run ended with an error", 1, 0, unit="runs")
            return
        else:
            state.after_the_end()
    while status := os.waitpid(state.start(), 0)[1]:
        board.bar("the last run ended with an error", status, 0, unit="status")
    state.after_the_end()
    board.figure("SIGKILL at random moments", done, unit="kills", finished=state.finished)
    board.bar("unreadable reports", state.unreadable, 0, unit="reports")
    board.bar("cases lost in finished reports", state.lost, 0, unit="cases")
    board.bar("cases twice in finished reports", state.doubled, 0, unit="cases")
    board.bar("orphan files after the next start", state.orphans, 0, unit="files")
    board.bar("cases repeated after a kill, at most", state.most_repeated, 1, unit="cases")


def odd_machines(board: Board, top: Path) -> None:
    """The trees of tests/unit/probes: each is read right, or what it doesn't contain is unknown."""
    right = 0
    for number, case in enumerate(test_probe_trees.CASES):
        found = test_probe_trees.read(case, top / str(number))
        right += found == case.expected
        if found != case.expected:
            print(f"{case.name}: read {found}, expected {case.expected}", file=sys.stderr)
    count = len(test_probe_trees.CASES)
    board.bar("made-up machines read wrong", count - right, 0, unit="trees", of=count)


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else KILLS
    began_s = time.monotonic()
    board = Board("probes", whole=kills == KILLS)
    ended_s = LIMIT_S + 2 * GRACE_S + 1.0
    misbehave(board, "hanging workers", HANGING, count=HANGS, limit_s=LIMIT_S, within_s=ended_s)
    noticed_s = CRASH_LIMIT_S / 2  # not only by the time limit
    misbehave(
        board,
        "crashing and babbling workers",
        CRASHING,
        count=CRASHES,
        limit_s=CRASH_LIMIT_S,
        within_s=noticed_s,
    )
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "reports"
        folder.mkdir()
        kill_at_random(board, folder, kills)
        odd_machines(board, Path(top) / "trees")
    took_s = time.monotonic() - began_s
    board.bar("the whole bench", took_s, 900, unit="s")
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())

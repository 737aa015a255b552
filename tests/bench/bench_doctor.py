"""The bars of `weir doctor`: verdicts on hosts, the linter on broken, good and hostile files, time.

    bench_doctor.py

The hosts and files are the unit tests'; here they are counted, damaged by the thousand, and timed.
"""

import datetime
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "unit" / "doctor")]

from board import Board, tell  # noqa: E402
from contradictions import all_cells, contradictions  # noqa: E402
from host_trees import host_of  # noqa: E402
from lint_files import broken  # noqa: E402
from lint_good import good  # noqa: E402
from test_compatibility import FAULTS, whole  # noqa: E402
from test_hosts import CASES, TODAY, recorded  # noqa: E402

from buildtool.doctor.advice import advise  # noqa: E402
from buildtool.doctor.compatibility import compatibility, read  # noqa: E402
from buildtool.doctor.lint.linter import lint  # noqa: E402
from buildtool.doctor.lint.rules import rules  # noqa: E402
from buildtool.doctor.text import answer_text  # noqa: E402

DAMAGED = 20_000
PIECES = (b"<<EOF", b"$(", b"'", b'"', b"\\\n", b"{", b"&a", b"*a", b"\t", b"\xff", b"\x00", b"`", b"#")


def main() -> int:
    """Judge every bar; exit 1 when one is missed."""
    board = Board()
    hosts(board)
    data(board)
    files(board)
    hostile(board)
    growth(board)
    answer_time(board)
    return board.finish()


def hosts(board: Board) -> None:
    """Every constructed host must get its verdict."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            host = host_of(case, Path(folder) / case.name)
            advice = advise(host, compatibility(), TODAY)
            text = answer_text(host, advice, [])
            best = advice.cards[0].best if advice.cards else None
            right = advice.next_step == case.next_step and all(words in text for words in case.says)
            if case.target:
                first = advice.cards[0]
                right &= (first.target, best.rank if best else "none") == (case.target, case.rank)
                right &= best is not None and best.torch.startswith(case.torch)
            wrong += [] if right else [case.name]
    board.bar("constructed hosts", len(CASES), 40, "hosts", at_least=True)
    board.bar("hosts with a wrong verdict", len(wrong), 0, "hosts", wrong=wrong)


def data(board: Board) -> None:
    """Cells have sources; contradictions are found."""
    known = compatibility()
    cells = list(all_cells(known))
    board.figure("cells", len(cells), "cells")
    board.figure("targets", len(known.targets), "targets")
    board.bar(
        "cells without a source", sum(cell.source not in known.sources for _, cell in cells), 0, "cells"
    )
    today = datetime.datetime.now(datetime.UTC).date()
    board.bar("contradictions in the data", len(contradictions(known, today)), 0, "contradictions")
    found = sum(planted(edit, said) for edit, said in FAULTS.values())
    board.bar("planted contradictions that are found", found, len(FAULTS), "faults", at_least=True)
    stale = [name for name, source in known.sources.items() if source.is_stale(today)]
    board.figure("sources older than a year, marked", len(stale), "sources")


def planted(edit: Callable[[dict[str, object]], object], said: str) -> bool:
    """Whether a contradiction that is written into the data is found."""
    import copy

    raw = copy.deepcopy(whole())
    edit(raw)
    return any(said in fault for fault in contradictions(read(raw), TODAY))


def files(board: Board) -> None:
    """Broken files have their faults named by line; good ones raise no alarm."""
    marked = broken()
    missed = surplus = 0
    for file in marked:
        found = {(fault.line, fault.rule) for fault in lint(file.name, file.text.encode())}
        missed += len(set(file.faults) - found)
        surplus += len(found - set(file.faults))
    board.bar("rules", len(rules()), 40, "rules", at_least=True)
    board.bar("broken files", len(marked), 60, "files", at_least=True)
    board.figure("faults in them", sum(len(file.faults) for file in marked), "faults")
    board.bar("faults missed", missed, 0, "faults")
    board.bar("faults named that nobody marked", surplus, 0, "faults")
    sound = good()
    alarms = [name for name, text in sound if lint(name, text.encode())]
    board.bar("good files", len({text for _, text in sound}), 200, "files", at_least=True)
    board.bar("good files that raise an alarm", 100 * len(alarms) / len(sound), 2, "%", alarms=alarms)


def hostile(board: Board) -> None:
    """Damaged files end in faults, not in tracebacks."""
    rng = random.Random(2026)
    sources = [(file.name, file.text.encode()) for file in broken()] + [
        (n, t.encode()) for n, t in good()[::5]
    ]
    raised: list[str] = []
    for _ in range(DAMAGED):
        name, text = rng.choice(sources)
        damaged = damage(text, rng)
        try:
            lint(name, damaged)
        except Exception as error:  # whatever it is, it is a miss
            raised.append(f"{name}: {type(error).__name__}: {error}"[:200])
    board.bar(f"tracebacks in {DAMAGED} damaged files", len(raised), 0, "tracebacks", first=raised[:3])


def damage(text: bytes, rng: random.Random) -> bytes:
    """A text with some bytes changed, cut out, put in or repeated."""
    data = bytearray(text)
    for _ in range(rng.randrange(1, 15)):
        place = rng.randrange(len(data) or 1)
        match rng.randrange(4):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place : place + rng.randrange(40)]
            case 2:
                data[place:place] = rng.choice(PIECES)
            case _:
                data += data[place : place + 80]
    return bytes(data)


LONG: dict[str, tuple[str, Callable[[int], str]]] = {
    "Dockerfile, instructions": (
        "Dockerfile",
        lambda n: "FROM a:1\n" + "RUN pip install --no-cache-dir x && echo y\n" * n,
    ),
    "Dockerfile, continuations": (
        "Dockerfile",
        lambda n: "FROM a:1\n" + ("RUN a" + " \\\n  b" * 100 + "\n") * max(1, n // 100),
    ),
    "Dockerfile, heredoc": (
        "Dockerfile",
        lambda n: "FROM a:1\n" + ("RUN <<E\n" + "echo x\n" * 1000 + "E\n") * max(1, n // 1000),
    ),
    "compose, services": (
        "compose.yaml",
        lambda n: "services:\n" + "".join(f"  s{i}: {{image: a:1}}\n" for i in range(n)),
    ),
    "shell, commands": ("x.sh", lambda n: "docker run --rm a:1 ls | cat\n" * n),
    "shell, quotes": ("x.sh", lambda n: "echo 'a' \"$b\" " * n),
    "requirements": ("requirements.txt", lambda n: "a==1\n" * n),
    "devcontainer, comments": ("devcontainer.json", lambda n: "{\n" + "// c\n" * n + '"image": "a:1"}'),
    "job": ("x.sbatch", lambda n: "#!/bin/sh\n" + "#SBATCH --gres=gpu:1\n" * n),
    "Python": ("x.py", lambda n: "x.to('cuda')\n" * n),
}


def growth(board: Board) -> None:
    """Twice the file takes at most three times as long; the shortest of five, for files of 120 KB.

    In processor time, each length in turns, without the collector of cyclic garbage, which runs whenever the
    heap has grown by a quarter: that makes steps, and other processes make wall time longer.
    """
    for name, (file, make) in LONG.items():
        lines = 60_000 * 1_000 // len(make(1_000).encode())
        small, large = (make(n).encode() for n in (lines, 2 * lines))
        once, twice = shortest_in_turns(partial(lint, file, small), partial(lint, file, large))
        board.bar(f"time of twice as much: {name}", twice / once, 3, "times", seconds=round(twice, 3))
    vast_heredoc = ("FROM a:1\nRUN <<E\n" + "x\n" * 100_000 + "E\n").encode()
    board.bar("a heredoc of 100,000 lines", timed(partial(lint, "Dockerfile", vast_heredoc)), 1, "s")
    endless = ("FROM a:1\nRUN a" + " \\\n  b" * 40_000).encode()
    board.bar("an instruction of 40,000 lines", timed(partial(lint, "Dockerfile", endless)), 1, "s")
    with tempfile.TemporaryDirectory() as folder:
        vast = Path(folder) / "Dockerfile"
        with vast.open("wb") as file_:
            file_.truncate(120_000_000)
        command = [sys.executable, "-m", "buildtool", "doctor", "--lint", str(vast)]
        run = partial(subprocess.run, command, cwd=ROOT, capture_output=True, check=False)
        board.bar("a file of 120 MB: the whole program", timed(run), 2, "s")


def shortest_in_turns(*works: Callable[[], object]) -> list[float]:
    """The least processor time of each, of five rounds, in seconds."""
    found: list[list[float]] = [[] for _ in works]
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            for work, seconds in zip(works, found, strict=True):
                begun = time.process_time()
                work()
                seconds.append(time.process_time() - begun)
                gc.collect()
    finally:
        gc.enable()
    return [min(seconds) for seconds in found]


def timed(work: Callable[[], object]) -> float:
    """The median of five runs, in seconds."""
    return sorted(taken(work))[2]


def taken(work: Callable[[], object]) -> list[float]:
    """Five runs, in seconds."""
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return found


def answer_time(board: Board) -> None:
    """A fresh process from its start to its end, as a user waits for it."""
    command = [sys.executable, "-m", "buildtool", "doctor"]
    last = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = timed(lambda: subprocess.run(command, cwd=ROOT, capture_output=True, check=False))
    board.bar("`weir doctor`, median of 5", seconds, 2, "s", exit_code=last.returncode)
    ends = last.stdout.rstrip().splitlines()[-2:]
    board.bar(
        "it ends with one command",
        int(ends[:1] == ["next, type:"] and len(ends) == 2),
        1,
        "yes",
        at_least=True,
    )
    tell(f"the command: {ends[-1].strip() if ends else 'none'}")
    card = advise(recorded(), compatibility(), TODAY).cards[0]
    best = card.best
    right = bool(best) and (card.target, best.rank, best.torch) == ("sm_90", "official", "2.14.0+cu130")
    board.bar("the H200 machine, recorded on it: verdict right", int(right), 1, "yes", at_least=True)
    board.waive("an AMD machine, for real", "none was available")


if __name__ == "__main__":
    sys.exit(main())

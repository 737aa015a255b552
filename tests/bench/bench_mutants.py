"""The bar of `make mutants`: what share of small faults, planted one at a time, fails a unit test.

    bench_mutants.py [--sample N | --all | --again LOG] [--only PART-OF-A-PATH]
                     [--tests DIR-OR-FILE,...] [--seed N] [--jobs N]

A process imports pytest and every unit test once and notes which lines each test runs. For each mutant it
forks, replaces the live function with the changed one, and runs the tests that reach the line until one
fails. What is computed at import time (constants, tables, defaults) needs a fresh import: such mutants run in
forks of a process that has imported everything but this project. CPU time and memory are limited, and a
mutant that exceeds its limit counts as killed. A sample is drawn by the hash of seed and name, so that it
stays the same while other code changes. `mutants_equivalent.toml` lists mutants that behave as the original.
"""

import argparse
import functools
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest
from mutate import Mutant, mutants

ROOT = Path(__file__).parents[2]
TESTS = (
    "audit", "builder", "buildtool", "engine", "gpucode", "probes", "prune",
    "test_exports.py", "test_files.py", "test_terminal.py",
)  # fmt: skip
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
# Decisions about users' files, about what is read from outside, and statistics. Pages, tables and command
# lines, and whatever talks to engines and GPUs, are judged by tests of other kinds.
SHOWN = {"diff_text.py", "html.py", "render.py", "subject.py"}
WHOLE = ("buildtool/audit", "buildtool/gpucode")
CHOSEN = {
    "buildtool": "errors files model places",
    "buildtool/builder": "lockfile plan",
    "buildtool/engine": "bakefile proof",
    "buildtool/prune": "archives flat manifest rewrite trees",
    "probes/machine": "expectation prunemanifest",
    "probes/measure": "breakeven noise pattern pressure sampling spill transfer",
    "probes/records": "facts schema stats",
    "probes/report": "answers crossover headline pieces residency",
    "probes/run": "journal",
    "probes/shared": "codec failure files quoting units",
}
MODULES = (
    *(
        path.relative_to(ROOT).as_posix()
        for folder in WHOLE
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in SHOWN
    ),
    *(f"{folder}/{name}.py" for folder, names in CHOSEN.items() for name in names.split()),
)
SAMPLE = 1500
ENOUGH = 2000  # lines that a function repeats in a test
MEMORY_BYTES = 2 << 30  # beyond what the process has mapped when it is forked
ERRORS = os.dup(2)  # what tests write goes elsewhere
SURVIVED, KILLED, RELOAD, BROKEN = 0, 1, 2, 3  # exit statuses of a mutant's process

DEAD = ("killed", "over its limits")

Lines = set[tuple[str, int]]


# --- which tests reach a line


class Tracer:
    """Collects the lines of the modules that run, in every thread, into `lines`.

    A function that has repeated itself often is traced no further: all of its lines count as run.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.lines: Lines = set()
        self._paths = {str(ROOT / path): path for path in paths}
        self._repeats: Counter[types.CodeType] = Counter()

    def __enter__(self) -> "Tracer":
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: types.FrameType, event: str, arg: object) -> Callable[..., object] | None:
        code, lines, repeats = frame.f_code, self.lines, self._repeats
        path = self._paths.get(code.co_filename)
        if path is None or repeats[code] > ENOUGH:
            return None

        def line(frame: types.FrameType, event: str, arg: object) -> Callable[..., object] | None:
            place = (path, frame.f_lineno)
            if place not in lines:
                lines.add(place)
            else:
                repeats[code] += 1
                if repeats[code] > ENOUGH:
                    lines.update((path, number) for _, _, number in code.co_lines() if number)
                    return None
            return line

        lines.add((path, frame.f_lineno))
        return line


class Reach:
    """Which tests run which lines, and what is executed before any test starts."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.at_import: Lines = set()
        self.seconds: dict[str, float] = {}
        self.imports: dict[str, set[str]] = {path: _imported(path) for path in paths}
        self._by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._by_path: dict[str, set[str]] = defaultdict(set)
        self._of_values: set[str] = set()

    def add(self, test: str, lines: Lines, seconds: float) -> None:
        """Note what a test did."""
        self.seconds[test] = seconds
        if not lines:
            self._of_values.add(test)
        for path, line in lines:
            self._by_line[path, line].add(test)
            self._by_path[path].add(test)

    def tests(self, mutant: Mutant) -> set[str]:
        """The tests that can notice a mutant.

        Of an import-time value, those of the modules that know it, and those that run no function at all:
        such a test looks at values alone (that `__all__` names what is there).
        """
        if mutant.scope.function:
            return set().union(*(self._by_line[mutant.path, line] for line in mutant.scope.lines))
        users = [path for path, names in self.imports.items() if _module(mutant.path) in names]
        return self._of_values.union(*(self._by_path[path] for path in (mutant.path, *users)))

    def before_tests(self, mutant: Mutant) -> bool:
        """Does the mutant change what import or collection computes?"""
        return not mutant.scope.function or any(
            (mutant.path, line) in self.at_import for line in mutant.scope.lines
        )


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _imported(path: str) -> set[str]:
    words = (ROOT / path).read_text().replace("import ", " ").split()
    return {word.strip("(),") for word in words if "." in word}


# --- a mutant's process


def forked(child: Callable[[], int], cpu_s: float) -> int:
    """Start a process that ends with what `child` returns, with limits; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = BROKEN
    try:
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, -1))
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s), math.ceil(cpu_s) + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 60 + 10 * cpu_s)
        status = child()
    except MemoryError:
        status = KILLED
    finally:
        os._exit(status)


class Pool:
    """Runs mutants' processes, so many at once, and hands each one's verdict to `done`."""

    def __init__(self, jobs: int, done: Callable[[str, str], None]) -> None:
        self._jobs = jobs
        self._done = done
        self._running: dict[int, str] = {}

    def start(self, key: str, child: Callable[[], int], cpu_s: float) -> None:
        """Run one; waits while all places are taken."""
        while len(self._running) >= self._jobs:
            self._reap()
        self._running[forked(child, cpu_s)] = key

    def finish(self) -> None:
        """Wait for all."""
        while self._running:
            self._reap()

    def _reap(self) -> None:
        pid, status = os.wait()
        verdicts = {SURVIVED: "survived", KILLED: "killed", RELOAD: "reload"}
        verdict = (
            verdicts.get(os.WEXITSTATUS(status), "broken") if os.WIFEXITED(status) else "over its limits"
        )
        if (key := self._running.pop(pid, None)) is not None:
            self._done(key, verdict)


def note(line: str) -> None:
    """A line of the bench's own, whatever became of standard error."""
    os.write(ERRORS, f"{line}\n".encode())


def pytest_options(scratch: Path) -> list[str]:
    off = [part for name in ("cacheprovider", "xdist") for part in ("-p", f"no:{name}")]
    quiet = ("-qq", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    return [*off, *quiet, "--capture=no", f"--basetemp={scratch}", "-o", "tmp_path_retention_policy=failed"]


class Watcher:
    """Whether any report of a test was a failure."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def ordered(
    items: Sequence[pytest.Item], chosen: set[str], seconds: Mapping[str, float]
) -> list[pytest.Item]:
    """The chosen tests, files that take less time first."""
    files: Counter[Path] = Counter()
    mine = [item for item in items if item.nodeid in chosen]
    for item in mine:
        files[item.path] += max(round(seconds[item.nodeid] * 1e6), 1)
    return sorted(mine, key=lambda item: (files[item.path], item.path))


# --- functions, changed in place


class InPlace(Watcher):
    """A pytest plugin that runs the suite once, then each mutant of a function in a fork of this process."""

    def __init__(self, chosen: Sequence[Mutant], jobs: int, done: Callable[[str, str], None]) -> None:
        super().__init__()
        self.chosen = chosen
        self.reach = Reach(MODULES)
        self._pool = Pool(jobs, done)
        self._done = done
        self._tracer = Tracer(MODULES)
        self._tracer.__enter__()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.reach.at_import = self._tracer.lines
        self._tracer.__exit__()
        if self.failed:
            sys.exit(f"the tests can't be collected: {self.failed}")
        for index, item in enumerate(session.items):
            begun = time.process_time()
            with Tracer(MODULES) as tracer:
                run_item(item, session.items[index + 1] if index + 1 < len(session.items) else None)
            self.reach.add(item.nodeid, tracer.lines, time.process_time() - begun)
        if self.failed:
            sys.exit(f"the tests fail without any mutant: {self.failed}")
        note(
            f"{len(session.items)} tests pass and are traced, {sum(self.reach.seconds.values()):.0f} s of CPU"
        )
        self._run(session.items)
        return True

    def _run(self, items: Sequence[pytest.Item]) -> None:
        gc.unfreeze()  # the tests freeze what was collected; frozen functions couldn't be found
        functions = _functions()
        if not functions:
            raise RuntimeError(
                "no live function of the project was found: every mutant would be imported again"
            )
        caches = [thing for thing in gc.get_objects() if isinstance(thing, functools._lru_cache_wrapper)]
        ours = [cache for cache in caches if str(cache.__module__).startswith(("buildtool", "probes"))]
        gc.collect()
        gc.freeze()
        for mutant in self.chosen:
            tests = self.reach.tests(mutant)
            if not tests:
                self._done(key_of(mutant), "no test reaches it")
            elif not mutant.scope.function:
                self._done(key_of(mutant), "reload")
            else:
                mine = ordered(items, tests, self.reach.seconds)
                cpu_s = 5 + 5 * sum(self.reach.seconds[item.nodeid] for item in mine)
                child = functools.partial(self._child, mutant, mine, functions=functions, caches=ours)
                self._pool.start(key_of(mutant), child, cpu_s)
        self._pool.finish()

    def _child(
        self,
        mutant: Mutant,
        items: Sequence[pytest.Item],
        *,
        functions: Mapping[tuple[str, str, int], list[types.FunctionType]],
        caches: Iterable["functools._lru_cache_wrapper[object]"],
    ) -> int:
        try:
            put_in_place(mutant, functions)
        except (ValueError, LookupError):
            return RELOAD
        for cache in caches:
            cache.cache_clear()
        for index, item in enumerate(items):
            run_item(item, items[index + 1] if index + 1 < len(items) else None)
            if self.failed:
                return KILLED
        return RELOAD if self.reach.before_tests(mutant) else SURVIVED


def run_item(item: pytest.Item, following: pytest.Item | None) -> None:
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def _functions() -> dict[tuple[str, str, int], list[types.FunctionType]]:
    """Every live function of the project by file, name and line, however it is wrapped."""
    found = defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and thing.__code__.co_filename.startswith(str(ROOT)):
            code = thing.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
    return found


def put_in_place(mutant: Mutant, functions: Mapping[tuple[str, str, int], list[types.FunctionType]]) -> None:
    """Give the live function the mutant's code. Raises LookupError or ValueError when that can't be done."""
    file = str(ROOT / mutant.path)
    for code in _codes(compile(mutant.tree(), file, "exec", dont_inherit=True)):
        if code.co_qualname == mutant.scope.function and code.co_firstlineno <= mutant.line:
            for function in functions[file, code.co_qualname, code.co_firstlineno]:
                function.__code__ = code
                return
    raise LookupError(mutant.name)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


# --- modules, imported anew


class Finder(importlib.abc.MetaPathFinder):
    """Imports one module from a mutant's tree."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = _module(mutant.path)
        self._file = str(ROOT / mutant.path)
        self._code = compile(mutant.tree(), self._file, "exec", dont_inherit=True)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname != self._name:
            return None
        loader = importlib.machinery.SourceFileLoader(fullname, self._file)
        loader.get_code = lambda _: self._code  # type: ignore[method-assign,assignment,misc]
        return importlib.util.spec_from_file_location(fullname, self._file, loader=loader)


class Chosen(Watcher):
    """A pytest plugin that keeps to chosen tests, in a given order, until one fails."""

    def __init__(self, chosen: set[str], seconds: Mapping[str, float]) -> None:
        super().__init__()
        self._chosen, self._seconds = chosen, seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = ordered(items, self._chosen, self._seconds)


def imported_anew(mutant: Mutant, tests: set[str], seconds: Mapping[str, float], scratch: Path) -> int:
    """Run the tests against a module that was imported as a mutant."""
    sys.meta_path.insert(0, Finder(mutant))
    files = sorted({test.partition("::")[0] for test in tests})
    plugin = Chosen(tests, seconds)
    own = scratch / str(os.getpid())
    status = pytest.main([*pytest_options(own), "-x", *files], plugins=[plugin])
    if plugin.failed:
        return KILLED
    return SURVIVED if status == pytest.ExitCode.OK else BROKEN


# --- the whole


def key_of(mutant: Mutant) -> str:
    return f"{mutant.path}::{mutant.name}"


def draw(every: Sequence[Mutant], *, count: int | None, seed: int) -> list[Mutant]:
    """The sample, in the order of its hashes."""
    by_hash = sorted(every, key=lambda one: hashlib.sha256(f"{seed} {key_of(one)}".encode()).digest())
    return by_hash[:count]


def survivors(every: Sequence[Mutant], log: str) -> list[Mutant]:
    """Those that a run reported as alive. `log` is what it printed."""
    rows = [json.loads(line) for line in log.splitlines() if line.startswith('{"survivor"')]
    alive = {f"{row['survivor'].rpartition(':')[0]}::{row['mutant']}" for row in rows}
    return [one for one in every if key_of(one) in alive]


def interval(killed: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, killed / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return round(middle - half, 4), round(middle + half, 4)


def run(chosen: Sequence[Mutant], jobs: int, *, folders: Sequence[str], scratch: Path) -> dict[str, str]:
    """Every mutant's verdict by its key."""
    verdicts: dict[str, str] = {}
    begun = time.monotonic()

    def done(key: str, verdict: str) -> None:
        verdicts[key] = verdict
        if verdict not in (*DEAD, "reload"):
            note(f"{verdict}: {key}")
        if len(verdicts) % 250 == 0:
            note(f"{len(verdicts)} of {len(chosen)} mutants, {time.monotonic() - begun:.0f} s")

    reader, writer = os.pipe()
    server = os.fork()
    if not server:
        os.close(reader)
        status = BROKEN
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            _serve(chosen, jobs, done, folders=folders, scratch=scratch, verdicts=verdicts, writer=writer)
            status = 0
        except BaseException:
            note(traceback.format_exc())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    if os.waitpid(server, 0)[1] or not text:
        sys.exit("the unit tests don't run as they are: `make check` says why")
    answer = json.loads(text)
    verdicts.update(answer["verdicts"])
    _anew(chosen, answer, jobs, done, scratch=scratch, verdicts=verdicts)
    return verdicts


def _serve(
    chosen: Sequence[Mutant],
    jobs: int,
    done: Callable[[str, str], None],
    *,
    folders: Sequence[str],
    scratch: Path,
    verdicts: Mapping[str, str],
    writer: int,
) -> None:
    """In a process of its own: all mutants that can be put in place; answers with verdicts and tests."""
    plugin = InPlace(chosen, jobs, done)
    files = [str(ROOT / "tests/unit" / name) for name in folders]
    if code := pytest.main([*pytest_options(scratch / "served"), *files], plugins=[plugin]):
        raise RuntimeError(f"pytest ended with {code!r}; failed: {plugin.failed}")
    left = [mutant for mutant in chosen if verdicts.get(key_of(mutant)) == "reload"]
    answer = {
        "verdicts": verdicts,
        "tests": {key_of(mutant): sorted(plugin.reach.tests(mutant)) for mutant in left},
        "seconds": plugin.reach.seconds,
        "modules": [name for name, module in sys.modules.items() if _is_installed(module)],
    }
    with os.fdopen(writer, "w") as pipe:
        json.dump(answer, pipe)


def _anew(
    chosen: Sequence[Mutant],
    answer: Mapping[str, Mapping[str, object]],
    jobs: int,
    done: Callable[[str, str], None],
    *,
    scratch: Path,
    verdicts: Mapping[str, str],
) -> None:
    """The mutants that need a fresh import, each in a fork of this process."""
    tests, seconds = answer["tests"], answer["seconds"]
    note(f"{len(tests)} mutants need a fresh import")
    _import_others(answer["modules"])
    pool = Pool(jobs, done)
    for mutant in chosen:
        if mine := set(tests.get(key_of(mutant), ())):
            cpu_s = 20 + 5 * sum(seconds[test] for test in mine)
            pool.start(
                key_of(mutant), functools.partial(imported_anew, mutant, mine, seconds, scratch), cpu_s
            )
    pool.finish()


def _is_installed(module: types.ModuleType) -> bool:
    place = getattr(module, "__file__", None)
    return place is not None and (not place.startswith(str(ROOT)) or "site-packages" in place)


def _import_others(names: Iterable[str]) -> None:
    """Import what the tests import that isn't ours, once for all forks."""
    for name in names:
        spec = sys.modules.get(name)
        if spec is None and name.split(".")[0] not in ("board", "mutate"):
            with suppress(Exception):
                importlib.import_module(name)
    ours = [name for name in sys.modules if name.split(".")[0] in ("buildtool", "probes")]
    assert not ours, ours


def equivalent(every: Iterable[Mutant]) -> dict[str, str]:
    """Keys of mutants that can't be distinguished from the original, with the reason.

    Exits for a stale entry.
    """
    listed = {
        f"{path}::{name}": why
        for path, entries in tomllib.loads(EQUIVALENT.read_text()).items()
        for name, why in entries.items()
    }
    if stale := sorted(listed.keys() - {key_of(one) for one in every}):
        sys.exit(f"{EQUIVALENT.name} lists mutants that no longer exist:\n  " + "\n  ".join(stale))
    return listed


def main() -> int:
    """Draw, run, say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=SAMPLE)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--again", type=Path, metavar="LOG", help="the survivors that an earlier run printed")
    parser.add_argument("--only", default="", help="modules whose path has this in it")
    parser.add_argument("--tests", default=",".join(TESTS), help="directories and files below tests/unit")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    os.chdir(ROOT)
    sys.path.append(str(ROOT))  # else `probes` would be the folder of that name below tests/unit
    hypothesis.settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("mutants")
    every = [one for path in MODULES for one in mutants(path, Path(path).read_text())]
    known = equivalent(every)
    told = [one for one in every if given.only in one.path and key_of(one) not in known]
    if given.again:
        told = survivors(told, given.again.read_text())
    chosen = draw(told, count=None if given.all or given.again else given.sample, seed=given.seed)
    whole = not given.only and not given.again and given.tests == ",".join(TESTS)
    with tempfile.TemporaryDirectory(prefix="weir-mutants-") as scratch:
        verdicts = run(chosen, given.jobs, folders=given.tests.split(","), scratch=Path(scratch))
    return say(chosen, verdicts, population=len(told), listed=len(known), seed=given.seed, whole=whole)


def say(
    chosen: Sequence[Mutant],
    verdicts: Mapping[str, str],
    *,
    population: int,
    listed: int,
    seed: int,
    whole: bool,
) -> int:
    """The survivors, a table by module, and the bar."""
    from board import Board  # imports the project, which no process may have before its mutant

    board = Board("mutants", command="make mutants", whole=whole)
    by_module: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in sorted(chosen, key=lambda one: (one.path, one.line)):
        verdict = verdicts[key_of(mutant)]
        by_module[mutant.path]["killed" if verdict in DEAD else "alive"] += 1
        if verdict not in DEAD:
            place = f"{mutant.path}:{mutant.line}"
            board.line({"survivor": place, "mutant": mutant.name, "because": verdict})
    for path, counts in sorted(by_module.items()):
        note(f"{counts['killed']:4} of {counts.total():4} killed in {path}")
    killed = sum(counts["killed"] for counts in by_module.values())
    low, high = interval(killed, len(chosen))
    board.bar(
        "mutants-killed",
        killed / len(chosen),
        0.90,
        "of the mutants",
        at_least=True,
        sampled=len(chosen),
        of=population,
        seed=seed,
        interval_95=[low, high] if len(chosen) < population else None,
        listed_as_equivalent=listed,
        over_their_limits=sum(verdict == "over its limits" for verdict in verdicts.values()),
    )
    return board.finish() or int("broken" in verdicts.values())


if __name__ == "__main__":
    sys.exit(main())

"""What share of small faults, planted one at a time, the unit tests notice: `make mutants`.

    bench_mutants.py [--sample N] [--seed N] [--only GLOB] [--each N] [--jobs N]

mutmut plants them in a copy of the sources, .weir/mutants, and runs for each the tests that reach its
function, in a fork of a process that has imported everything. A sample of all that it can
plant is drawn by the hash of seed and name.

Not drawn: what changes the wording of a text alone, since tests don't repeat messages. Code that needs torch
is left to the tests that have it (tests/torch). Other code that no unit test reaches counts as not noticed.
Survivors are lines of the results. `mutants_judged.toml` has those that somebody has found to behave as the
original; they count neither as noticed nor as not.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from board import ROOT, Board, tell

TREE = ROOT / ".weir" / "mutants"
JUDGED = Path(__file__).with_name("mutants_judged.toml")
PACKAGES = ("buildtool", "probes", "service")  # the last is images/service: its tests import it by this name
LEFT_OUT = (
    ".git",
    ".weir",
    ".venv*",
    "reports",
    "mutants",
    "__pycache__",
    ".*_cache",
    "*.egg-info",
    ".hypothesis",
)
SAMPLE = 1000
LEAST = 0.85
# they judge the sources, or what is beside them, not what the code does
LEFT = ("docs/test_docs_diagram.py", "docs/test_docs_pages.py", "docs/test_docs_parsed.py")
LEFT += ("docs/test_env_example.py", "docs/test_results_pages.py", "test_alone.py")
LEFT += ("test_figures.py", "test_layers.py", "test_names_elsewhere.py", "test_sandbox.py")
LEFT += ("test_mutants.py", "buildtool/test_shipped.py")
# simulations that take seconds each and reach little that shorter tests don't
LONG = ("test_planning", "test_ratio", "test_served_levels", "test_soundness", "test_tags_wait_for_proofs")
# the service behind real sockets, Hugging Face's protocol and Docker's, all in the process of the test
LOOPBACK = (
    "engine_answers",
    "service_clients",
    "service_http",
    "service_hub",
    "service_rpc",
    "service_sockets",
)
# one starts a program, two want pytest's logging, one lists names (mutmut adds some), others wait for seconds
APART = ("an_empty_variable_is_none", "ids_and_the_trace_are_passed_on", "no_hostile_message", "grows_old")
APART += ("have_all_places", "do_not_flood_the_log", "names_of_placement_and_their_arguments")
SELECTED = f"not ({' or '.join(APART)}) and (not thorough or not ({' or '.join(LONG)}))"
NEEDS_TORCH = re.compile(r"^\s*(import|from) (torch|triton|transformers|accelerate|peft)\b", re.MULTILINE)
TEXT = re.compile(r"[bfru]*(\"(\\.|[^\"\\])*\"|'(\\.|[^'\\])*')", re.IGNORECASE)
# mutmut's exit codes: a failed test, pytest's own error, and what ran for too long or died of a signal
NOTICED = {1, 3, 24, 36, 152, 255, -9, -11, -24}


def copy_sources(only: str, each: int, seed: int) -> list[str]:
    """The sources in a tree of their own, and the files of it to change.

    What mutmut made there of files that haven't changed stays, unless other files are to be changed: it takes
    what it only copied for something that it has changed.
    """
    TREE.mkdir(parents=True, exist_ok=True)
    project = TREE / "pyproject.toml"
    before = project.read_text(encoding="utf-8") if project.exists() else ""
    for path in TREE.iterdir():
        if path.name != "mutants":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True, symlinks=True)
    shutil.move(TREE / "images" / "service", TREE / "service")
    shutil.copytree(TREE / "images" / "profiles", TREE / "profiles")
    chosen = modules(only, each, seed)
    project.write_text(f"{project.read_text(encoding='utf-8')}\n{configuration(chosen)}", encoding="utf-8")
    if project.read_text(encoding="utf-8") != before:
        shutil.rmtree(TREE / "mutants", ignore_errors=True)
    return chosen


def modules(only: str, each: int, seed: int) -> list[str]:
    """Files with functions to change: all that match, or so many of each package."""
    texts = {path: (TREE / path).read_text(encoding="utf-8") for path in fnmatch.filter(sources(), only)}
    found = [path for path, text in texts.items() if "def " in text and not NEEDS_TORCH.search(text)]
    of_package: Counter[Path] = Counter()
    chosen = []
    for path in drawn(found, seed):
        of_package[Path(path).parent] += 1
        if not each or of_package[Path(path).parent] <= each:
            chosen.append(path)
    return sorted(chosen)


def configuration(mutated: Sequence[str]) -> str:
    """mutmut's."""
    beside = [path.name for path in TREE.iterdir() if path.name not in (*PACKAGES, "mutants", "tests")]
    ignored = [f"--ignore=tests/unit/{name}" for name in LEFT]
    beyond = [f"tests/loopback/test_{name}.py" for name in LOOPBACK]
    values = {
        "source_paths": PACKAGES,
        "only_mutate": mutated,
        "also_copy": beside,
        "pytest_add_cli_args": ("-p", "no:logging", "-p", "no:cacheprovider"),
        "pytest_add_cli_args_test_selection": ("tests/unit", *beyond, "-k", SELECTED, *ignored),
    }
    return "\n".join(
        ["[tool.mutmut]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    )


def sources() -> list[str]:
    found = (path for package in PACKAGES for path in (TREE / package).rglob("*.py"))
    return sorted(path.relative_to(TREE).as_posix() for path in found)


def mutmut(*names: str, jobs: int) -> None:
    """Generate what isn't there yet, look which tests reach what, and judge the mutants of these names."""
    # as `make check` runs them
    more = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [Path(sys.executable).with_name("mutmut"), "run", "--max-children", str(jobs), *names]
    subprocess.run(command, cwd=TREE, env={**os.environ, **more}, stdout=sys.stderr, check=False)


def verdicts(paths: Sequence[str]) -> dict[str, tuple[str, int | None]]:
    """Every mutant that mutmut made of files: its file, and pytest's exit code once it was judged."""
    found = {}
    for path in paths:
        kept = TREE / "mutants" / f"{path}.meta"
        codes = json.loads(kept.read_text())["exit_code_by_key"] if kept.exists() else {}
        found |= {name: (path, code) for name, code in codes.items()}
    return found


def drawn(names: Sequence[str], seed: int) -> list[str]:
    """In an order that the seed decides."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())


def change(name: str, path: str) -> str:
    """The lines that differ, without their place; empty where only the wording of a text does."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    lines = get_diff_for_mutant(name, path=path).splitlines()[3:]
    before, after = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return "" if wording_alone(before, after) else f"{' '.join(before)} -> {' '.join(after)}"


def wording_alone(before: Sequence[str], after: Sequence[str]) -> bool:
    """Whether lines of code differ in their texts and in nothing else."""
    return [TEXT.sub("''", line) for line in before] == [TEXT.sub("''", line) for line in after]


def sample(known: Mapping[str, tuple[str, int | None]], count: int, seed: int) -> dict[str, str]:
    """Names of mutants and what they change."""
    os.chdir(TREE)  # mutmut looks for its files there
    chosen: dict[str, str] = {}
    for name in drawn(list(known), seed):
        if len(chosen) == count:
            break
        if what := change(name, known[name][0]):
            chosen[name] = what
    return chosen


def judge(board: Board, known: Mapping[str, tuple[str, int | None]], chosen: Mapping[str, str]) -> None:
    """The bar, a line for each survivor that nobody has called equivalent, and the packages."""
    equivalent = tomllib.loads(JUDGED.read_text(encoding="utf-8"))
    noticed: Counter[str] = Counter()
    drawn_of: Counter[str] = Counter()
    judged = 0
    for name, what in chosen.items():
        path, code = known[name]
        alive = code not in NOTICED
        if alive and what in equivalent.get(path, {}):
            judged += 1
            continue
        package = Path(path).parent.as_posix()
        drawn_of[package] += 1
        noticed[package] += not alive
        if alive:
            board.line(
                {"survivor": path, "mutant": name, "change": what, "because": WHY.get(code, f"{code}")}
            )
    for package, count in sorted(drawn_of.items()):
        board.figure(f"{package}: noticed", noticed[package], f"of {count}")
    board.figure("equivalent, by judgement", judged, "mutants")
    share = noticed.total() / max(1, drawn_of.total())
    board.bar(
        "mutants that a unit test notices", share, LEAST, "of those drawn", at_least=True, drawn=len(chosen)
    )


WHY = {0: "all tests pass", 5: "no test reaches it", 33: "no test reaches it", None: "not judged"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the sample")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of the files, such as 'probes/fit/*'")
    parser.add_argument("--each", type=int, default=0, metavar="N", help="modules of each package; 0: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="side by side")
    args = parser.parse_args()
    board = Board(
        "mutants", command="make mutants", whole=args.sample >= SAMPLE and args.only == "*" and not args.each
    )
    paths = copy_sources(args.only, args.each, args.seed)
    tell("mutmut makes the mutants and looks which tests reach them ...")
    mutmut(
        "of no name", jobs=args.jobs
    )  # it makes all, looks which test reaches which, then finds none to judge
    if not (TREE / "mutants" / "mutmut-stats.json").exists():
        tell("mutmut stopped: what it said is above")
        return 2
    made = verdicts(paths)
    chosen = sample(made, args.sample, args.seed)
    tell(f"{len(made)} mutants of {len(paths)} modules, {len(chosen)} drawn ...")
    mutmut(*chosen, jobs=args.jobs)
    judge(board, verdicts(paths), chosen)
    return board.finish()


if __name__ == "__main__":
    sys.exit(main())

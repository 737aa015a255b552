"""The architecture, held: who may import whom, and where the outside world may be touched."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(p for top in ("buildtool", "probes") for p in (ROOT / top).rglob("*.py"))

# package -> the one set of modules that may import it ("dir/" means every module below)
GATES = {
    "docker": {"buildtool/engine.py"},
    "requests": {"buildtool/engine.py"},
    "yaml": {"buildtool/catalog.py"},
    "jsonschema": {"buildtool/catalog.py"},
    "subprocess": {"buildtool/command.py", "probes/worker.py"},
    "tabulate": {
        "buildtool/audit/diff_text.py",
        "buildtool/audit/render.py",
        "buildtool/table.py",
        "probes/render.py",
    },
    "elftools": {"buildtool/gpucode/"},
    "torch": {
        "probes/architectures.py",
        "probes/device.py",
        "probes/stack.py",
        "probes/torchfacts.py",
    },
    "matplotlib": {"buildtool/probereport/canvas.py", "buildtool/probereport/draw.py"},
    "transformers": {"probes/architectures.py"},
}
# program -> what of the other program it may import
ACROSS = {
    "buildtool": {
        "probes.answers",
        "probes.breakeven",
        "probes.codec",
        "probes.errors",
        "probes.facts",
        "probes.files",
        "probes.fit",
        "probes.headline",
        "probes.interrupt",
        "probes.output",
        "probes.placement",
        "probes.readable",
        "probes.report",
        "probes.residency",
        "probes.rounds",
        "probes.stats",
        "probes.units",
    },
    "probes": set(),
}
# thought: values in, values out; may not import any of the modules that act
THOUGHT = {
    "buildtool/plan.py",
    "buildtool/model.py",
    "buildtool/proof.py",
    "buildtool/flat.py",
    "buildtool/errors.py",
    "buildtool/quoting.py",
    "buildtool/gpucode/names.py",
    "buildtool/gpucode/prune.py",
    "buildtool/gpucode/scan.py",
    "buildtool/gpucode/verify.py",
    "buildtool/audit/budget.py",
    "buildtool/audit/documents.py",
    "buildtool/audit/choice.py",
    "buildtool/audit/claims.py",
    "buildtool/audit/contents.py",
    "buildtool/audit/copies.py",
    "buildtool/audit/exposure.py",
    "buildtool/audit/finding.py",
    "buildtool/audit/mismatches.py",
    "buildtool/audit/secrets.py",
    "buildtool/audit/unindexed.py",
    "buildtool/audit/facts.py",
    "buildtool/audit/faults.py",
    "buildtool/audit/findings.py",
    "buildtool/audit/image.py",
    "buildtool/audit/kinds.py",
    "buildtool/audit/layer.py",
    "buildtool/audit/limits.py",
    "buildtool/audit/merge.py",
    "buildtool/audit/packages.py",
    "buildtool/audit/render.py",
    "buildtool/audit/report.py",
    "buildtool/audit/tarfields.py",
    "buildtool/audit/tarwalk.py",
    "buildtool/audit/unpack.py",
    "buildtool/audit/tree.py",
    "buildtool/audit/sarif.py",
    "buildtool/audit/junit.py",
    "buildtool/audit/html_page.py",
    "buildtool/audit/diff_text.py",
    "buildtool/audit/diff.py",
    "buildtool/audit/baseline.py",
    "buildtool/probereport/charts.py",
    "buildtool/probereport/compare.py",
    "buildtool/probereport/exposition.py",
    "buildtool/probereport/page.py",
    "buildtool/probereport/palette.py",
    "buildtool/probereport/quantities.py",
    "buildtool/probereport/ratio.py",
    "buildtool/probereport/schema.py",
    "buildtool/probereport/svg.py",
    "buildtool/probereport/tables.py",
    "probes/stats.py",
    "probes/facts.py",
    "probes/fit.py",
    "probes/breakeven.py",
    "probes/noise.py",
    "probes/rereads.py",
    "probes/machine_text.py",
    "probes/codec.py",
    "probes/report.py",
    "probes/pattern.py",
    "probes/readable.py",
    "probes/model.py",
    "probes/workbench.py",
    "probes/sampling.py",
    "probes/transfer.py",
    "probes/spill.py",
    "probes/scenarios.py",
    "probes/residency.py",
    "probes/rounds.py",
    "probes/expectation.py",
    "probes/answers.py",
    "probes/headline.py",
    "probes/progress.py",
    "probes/render.py",
}
ACTING = {
    "buildtool.engine",
    "buildtool.command",
    "buildtool.buildx",
    "buildtool.sources",
    "probes.device",
    "probes.torchfacts",
    "probes.architectures",
    "probes.numa",
    "probes.nvml",
    "probes.watch",
    "probes.surroundings",
    "probes.journal",
    "probes.stack",
    "probes.placement",
    "probes.machine",
    "probes.worker",
}


# who may open a file for writing by himself; everybody else goes through buildtool/files.py
WRITERS = {
    "probes/files.py",  # the mechanism
    "buildtool/files.py",
    "probes/journal.py",  # appends to a file that it holds locked
    "probes/lock.py",  # a lock file without content
    "probes/job.py",  # a pipe to the parent process
    "buildtool/command.py",  # the log of a program that outlives us
    "buildtool/provision.py",  # a scratch directory for apt
    "buildtool/context.py",  # fills a scratch directory that is renamed as a whole
    "buildtool/wheels.py",  # pip's scratch directory
    "buildtool/audit/gpuprobe.py",  # a file without a name
    # these write into what `replacing` or `scratch` gave them
    "buildtool/imageprune.py",
    "buildtool/layerfile.py",
    "buildtool/gpucode/archive.py",
    "buildtool/gpucode/manifest.py",  # the journal of a prune, O_EXCL
}
WRITES = re.compile(
    r"""\.write_(text|bytes)\(|open\([^)]*["'][wax]b?\+?b?["']"""  # by Path, by open()
    r"|O_CREAT|O_WRONLY|\btempfile\."
)
IS_OURS = re.compile(r"\bfiles\.write_text\(")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, which several tests look through."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file; `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


SPEAKING = {"probes/output.py", "buildtool/progress.py"}  # these alone write for people, and quote it
FLUSHING = {"buildtool/cli.py", "probes/cli.py"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_reaches_a_terminal_unquoted(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    for node in nodes(path):
        assert not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and relative not in SPEAKING
        ), f"{relative} prints: only {SPEAKING} may"
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and is_sys(node.value):
            assert relative in SPEAKING | FLUSHING, f"{relative} uses {ast.unparse(node)}"


def is_sys(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "sys"


def allowed(relative: str, places: set[str]) -> bool:
    return any(relative == place or (place.endswith("/") and relative.startswith(place)) for place in places)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_module_keeps_to_its_layer(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    program = relative.split("/")[0]
    for name in imports(path):
        top = name.split(".")[0]
        if top in GATES:
            assert allowed(relative, GATES[top]), f"{relative} imports {name}: only {GATES[top]} may"
        if top in ACROSS and top != program and name != top:
            ok = any(name == a or name.startswith(a + ".") for a in ACROSS[program])
            assert ok, f"{relative} imports {name} of the other program"
        if relative in THOUGHT:
            assert name not in ACTING, f"{relative} thinks, {name} acts"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_are_written_in_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    lines = [line for line in path.read_text().splitlines() if WRITES.search(IS_OURS.sub("", line))]
    if relative not in WRITERS:
        assert not lines, f"{relative} writes files by itself: buildtool/files.py or probes/files.py does it"

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
    "docker": {"buildtool/engine/client.py"},
    "requests": {"buildtool/engine/client.py"},
    "yaml": {"buildtool/builder/catalog.py"},
    "jsonschema": {"buildtool/builder/catalog.py"},
    "subprocess": {"buildtool/command.py", "probes/run/supervisor.py"},
    "tabulate": {
        "buildtool/audit/report/diff_text.py",
        "buildtool/audit/report/render.py",
        "buildtool/builder/summary.py",
        "probes/report/render.py",
    },
    "elftools": {"buildtool/gpucode/"},
    "torch": {
        "probes/placement/architectures.py",
        "probes/measure/device.py",
        "probes/placement/stack.py",
        "probes/machine/torchfacts.py",
    },
    "matplotlib": {"probes/report/page/canvas.py", "probes/report/page/draw.py"},
    "transformers": {"probes/placement/architectures.py"},
}
# program -> what of the other program it may import
ACROSS = {
    "buildtool": {
        "probes.report.answers",
        "probes.report.crossover",
        "probes.records.codec",
        "probes.errors",
        "probes.records.facts",
        "probes.shared.files",
        "probes.report.fit",
        "probes.report.headline",
        "probes.shared.interrupt",
        "probes.shared.output",
        "probes.machine.sysfs",
        "probes.shared.quoting",
        "probes.records.schema",
        "probes.report.residency",
        "probes.records.rounds",
        "probes.records.stats",
        "probes.shared.units",
    },
    "probes": set(),
}
# thought: values in, values out; may not import any of the modules that act
THOUGHT = {
    "buildtool/builder/plan.py",
    "buildtool/model.py",
    "buildtool/engine/proof.py",
    "buildtool/prune/flat.py",
    "buildtool/errors.py",
    "probes/shared/quoting.py",
    "buildtool/gpucode/names.py",
    "buildtool/gpucode/cut/library.py",
    "buildtool/gpucode/formats/scan.py",
    "buildtool/gpucode/cut/verify.py",
    "buildtool/audit/judge/budget.py",
    "buildtool/audit/read/documents.py",
    "buildtool/audit/read/choice.py",
    "buildtool/audit/count/claims.py",
    "buildtool/audit/read/contents.py",
    "buildtool/audit/count/copies.py",
    "buildtool/audit/count/exposure.py",
    "buildtool/audit/judge/finding.py",
    "buildtool/audit/judge/mismatches.py",
    "buildtool/audit/inspect/secrets.py",
    "buildtool/audit/read/unindexed.py",
    "buildtool/audit/count/counts.py",
    "buildtool/audit/tar/faults.py",
    "buildtool/audit/judge/findings.py",
    "buildtool/audit/read/image.py",
    "buildtool/audit/count/kinds.py",
    "buildtool/audit/read/layer.py",
    "buildtool/audit/tar/limits.py",
    "buildtool/audit/read/merge.py",
    "buildtool/audit/count/packages.py",
    "buildtool/audit/report/render.py",
    "buildtool/audit/report/schema.py",
    "buildtool/audit/tar/tarfields.py",
    "buildtool/audit/tar/tarwalk.py",
    "buildtool/audit/tar/unpack.py",
    "buildtool/audit/count/treemap.py",
    "buildtool/audit/report/sarif.py",
    "buildtool/audit/report/junit.py",
    "buildtool/audit/report/html.py",
    "buildtool/audit/report/diff_text.py",
    "buildtool/audit/report/diff.py",
    "buildtool/audit/report/baseline.py",
    "probes/report/page/charts.py",
    "probes/report/compare.py",
    "probes/report/prometheus.py",
    "probes/report/page/html.py",
    "probes/report/page/palette.py",
    "probes/report/quantities.py",
    "probes/report/ratio.py",
    "probes/records/json_schema.py",
    "probes/report/page/svg.py",
    "probes/report/tables.py",
    "probes/records/stats.py",
    "probes/records/facts.py",
    "probes/report/fit.py",
    "probes/report/crossover.py",
    "probes/measure/noise.py",
    "probes/measure/breakeven.py",
    "probes/machine/describe.py",
    "probes/records/codec.py",
    "probes/records/schema.py",
    "probes/measure/pattern.py",
    "probes/placement/split.py",
    "probes/measure/workbench.py",
    "probes/measure/sampling.py",
    "probes/measure/transfer.py",
    "probes/measure/spill.py",
    "probes/measure/scenarios.py",
    "probes/report/residency.py",
    "probes/records/rounds.py",
    "probes/machine/expectation.py",
    "probes/report/answers.py",
    "probes/report/headline.py",
    "probes/run/remaining.py",
    "probes/report/render.py",
}
ACTING = {
    "buildtool.engine.client",
    "buildtool.command",
    "buildtool.engine.buildx",
    "buildtool.builder.sources",
    "probes.measure.device",
    "probes.machine.torchfacts",
    "probes.placement.architectures",
    "probes.machine.numa",
    "probes.machine.nvml",
    "probes.measure.watch",
    "probes.machine.surroundings",
    "probes.run.journal",
    "probes.placement.stack",
    "probes.machine.sysfs",
    "probes.machine.snapshot",
    "probes.run.supervisor",
}


# who may open a file for writing by himself; everybody else goes through buildtool/files.py
WRITERS = {
    "probes/shared/files.py",  # the mechanism
    "buildtool/files.py",
    "probes/run/journal.py",  # appends to a file that it holds locked
    "probes/run/lock.py",  # a lock file without content
    "probes/run/child.py",  # a pipe to the parent process
    "buildtool/command.py",  # the log of a program that outlives us
    "buildtool/engine/provision.py",  # a scratch directory for apt
    "buildtool/builder/context.py",  # fills a scratch directory that is renamed as a whole
    "buildtool/builder/wheels.py",  # pip's scratch directory
    "buildtool/audit/inspect/gpucode.py",  # a file without a name
    # these write into what `replacing` or `scratch` gave them
    "buildtool/prune/images.py",
    "buildtool/prune/layerfile.py",
    "buildtool/prune/archives.py",
    "buildtool/prune/manifest.py",  # the journal of a prune, O_EXCL
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


SPEAKING = {"probes/shared/output.py", "buildtool/progress.py"}  # these alone write for people, and quote it
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
        assert not lines, (
            f"{relative} writes files by itself: buildtool/files.py or probes/shared/files.py does it"
        )

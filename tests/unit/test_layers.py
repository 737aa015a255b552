"""The architecture, held: who may import whom, and where the outside world may be touched."""

import ast
import graphlib
import re
import sys
import tomllib
from collections import Counter, defaultdict

import architecture
from architecture import MODULES, ROOT, imports, name_of, nodes

# package -> the one set of modules that may import it ("dir/" means every module below)
GATES = {
    "docker": {"buildtool/engine/client.py", "buildtool/engine/connection.py"},
    "requests": {"buildtool/engine/client.py", "buildtool/engine/connection.py"},
    "shtab": {"buildtool/commands/completion.py"},
    "yaml": {"buildtool/yamltext.py"},
    "jsonschema": {"buildtool/builder/catalog.py"},
    "subprocess": {"buildtool/command.py", "probes/run/supervisor.py"},
    "tabulate": {"buildtool/audit/report/render.py", "probes/report/render.py"},
    "torch": {
        "probes/fit/measured/faketrace.py",
        "probes/fit/measured/onestep.py",
        "probes/fit/measured/onetrial.py",
        "probes/placement/architectures.py",
        "probes/placement/loading/",
        "probes/placement/packing/",
        "probes/placement/models/modules.py",
        "probes/placement/models/moduletree.py",
        "probes/placement/runtime/",
        "probes/measure/buffers.py",
        "probes/measure/device.py",
        "probes/placement/trial/stack.py",
        "probes/placement/trial/peers.py",
        "probes/placement/trial/compared.py",
        "probes/placement/trial/ondevice.py",
        "probes/placement/trial/checkpointed.py",
        "probes/machine/torchfacts.py",
        "probes/throughput/ceilings/topspeed.py",
        "probes/throughput/direct/counting.py",
        "probes/throughput/direct/onnxrunner.py",
        "probes/throughput/direct/testmodels.py",
        "probes/throughput/direct/torchrunner.py",
    },
    "rich": {"probes/watch/showing/screen.py"},
    "triton": {"probes/placement/packing/kernels/"},
    "matplotlib": {"probes/report/page/"},
    "dockerfile": {"buildtool/doctor/lint/dockerfiles.py"},
    "packaging": {"buildtool/doctor/lint/pip.py"},
    "tree_sitter": {"buildtool/doctor/lint/shellwords.py"},
    "tree_sitter_bash": {"buildtool/doctor/lint/shellwords.py"},
    "accelerate": {"probes/placement/trial/compared.py"},
    "onnxruntime": {"probes/throughput/direct/onnxrunner.py"},
    "transformers": {"probes/placement/architectures.py", "probes/placement/models/fromconfig.py"},
    "peft": {"probes/fit/measured/onestep.py"},
}
# program -> what of the other program it may import. Labels and JSON go between them; this is the vocabulary.
SHARED = "probes.shared"
ACROSS: dict[str, set[str]] = {"buildtool": {SHARED}, "probes": set()}
FORWARDING = {
    "buildtool/commands/probe.py": {"probes.cli"},  # `weir probe ...`
    # a host is read with the probes' readers of kernel files, which need the standard library alone
    "buildtool/doctor/gather.py": {"probes.machine", "probes.records.facts"},
    "buildtool/doctor/hostfacts.py": {"probes.records.facts"},
    "buildtool/doctor/shown.py": {"probes.records.facts"},
}
# thought: values in, values out; may not import any of the modules that act ("dir/": every module below)
THOUGHT = {
    "buildtool/errors.py",
    "buildtool/model.py",
    "buildtool/jsontext.py",
    "buildtool/audit/count/",
    "buildtool/audit/inspect/",
    "buildtool/audit/judge/",
    "buildtool/audit/read/",
    "buildtool/audit/report/",
    "buildtool/audit/tar/",
    "buildtool/builder/plan.py",
    "buildtool/doctor/advise.py",
    "buildtool/doctor/compatibility.py",
    "buildtool/doctor/hostfacts.py",
    "buildtool/doctor/lint/",
    "buildtool/doctor/lint_report.py",
    "buildtool/doctor/remarks.py",
    "buildtool/doctor/routes.py",
    "buildtool/engine/engineanswers.py",
    "buildtool/engine/bakefile.py",
    "buildtool/engine/proof.py",
    "buildtool/engine/reference.py",
    "buildtool/gpucode/",
    "buildtool/prune/flat.py",
    "buildtool/prune/imageconfig.py",
    "probes/fit/answering/",
    "probes/fit/question.py",
    "probes/fit/straight.py",
    "probes/fit/predicted/",
    "probes/fit/measured/bracket.py",
    "probes/machine/describe.py",
    "probes/machine/expectation.py",
    "probes/machine/gpumetrics.py",
    "probes/machine/hostload.py",
    "probes/measure/breakeven.py",
    "probes/measure/noise.py",
    "probes/measure/pattern.py",
    "probes/measure/pressure.py",
    "probes/measure/sampling.py",
    "probes/measure/scenarios.py",
    "probes/measure/spill.py",
    "probes/measure/transfer.py",
    "probes/measure/workbench.py",
    "probes/placement/models/description.py",
    "probes/placement/packing/tiles.py",
    "probes/placement/packing/estimate.py",
    "probes/placement/packing/forms.py",
    "probes/placement/packing/grid.py",
    "probes/placement/models/stored.py",
    "probes/placement/planner/",
    "probes/placement/runtime/storage/spilling.py",
    "probes/placement/showing/text.py",
    "probes/placement/soundness.py",
    "probes/placement/split.py",
    "probes/placement/trial/ways.py",
    "probes/records/",
    "probes/report/",
    "probes/run/remaining.py",
    "probes/shared/codec.py",
    "probes/shared/quoting.py",
    "probes/shared/units.py",
    "probes/throughput/ceilings/ceiling.py",
    "probes/throughput/direct/figures.py",
    "probes/throughput/direct/knee.py",
    "probes/throughput/direct/repeating.py",
    "probes/throughput/direct/saturation.py",
    "probes/throughput/direct/scanned.py",
    "probes/throughput/served/orderstats.py",
    "probes/throughput/served/rising.py",
    "probes/throughput/served/servedcurve.py",
    "probes/throughput/served/servedscan.py",
    "probes/throughput/served/stability.py",
    "probes/throughput/served/tallying.py",
    "probes/throughput/served/client/arrivals.py",
    "probes/throughput/served/client/described.py",
    "probes/throughput/served/client/driving.py",
    "probes/throughput/served/client/httpanswer.py",
    "probes/throughput/served/client/payload.py",
    "probes/throughput/served/client/address.py",
    "probes/throughput/showing/",
    "probes/watch/allocator.py",
    "probes/watch/deadlines.py",
    "probes/watch/samplelines.py",
    "probes/watch/saturated.py",
    "probes/watch/tallies/tally.py",
    "probes/watch/tallies/totals.py",
    "probes/watch/showing/words.py",
    "probes/throughput/direct/combinations.py",
}
ACTING = {
    "buildtool.command",
    "buildtool.builder.context",
    "buildtool.builder.rootfs",
    "buildtool.builder.sources",
    "buildtool.builder.wheels",
    "buildtool.doctor.gather",
    "buildtool.engine.buildx",
    "buildtool.engine.client",
    "buildtool.engine.connection",
    "buildtool.engine.host",
    "buildtool.engine.provision",
    "buildtool.engine.room",
    "probes.fit.measured.caps",
    "probes.fit.measured.cgroups",
    "probes.fit.measured.faketrace",
    "probes.fit.measured.forking",
    "probes.fit.measured.nursery",
    "probes.fit.measured.onestep",
    "probes.fit.measured.onetrial",
    "probes.fit.measured.runs",
    "probes.machine.numa",
    "probes.machine.nvml",
    "probes.machine.snapshot",
    "probes.machine.surroundings",
    "probes.machine.sysfs",
    "probes.machine.torchfacts",
    "probes.measure.buffers",
    "probes.measure.device",
    "probes.measure.bystanders",
    "probes.watch.watchedcommand",
    "probes.watch.showing.metricsserver",
    "probes.watch.recorder",
    "probes.watch.readers.keptfile",
    "probes.placement.architectures",
    "probes.placement.loading.checkpoint",
    "probes.placement.loading.filereading",
    "probes.placement.loading.load",
    "probes.placement.loading.readahead",
    "probes.placement.trial.stack",
    "probes.run.journal",
    "probes.run.supervisor",
    "probes.throughput.ceilings.topspeed",
    "probes.throughput.served.client.lines",
    "probes.throughput.direct.gauges",
    "probes.throughput.direct.torchrunner",
}
MOST_MODULES = 13  # of a folder, for a reader to see at once
LONGEST_CHAIN = 7  # of imports within a folder
# one name for one thing in several places; any other name says one thing
SAME_MEANING = {
    "catalog": "what there is to choose from: variants, probes",
    "cli": "a program's command line",
    "errors": "what can go wrong",
    "files": "how files are written; buildtool's has its own errors",
    "html": "a report as a page",
    "render": "a report as text and Markdown",
    "schema": "what a report holds",
}


# who may open a file for writing by himself; everybody else goes through buildtool/files.py
WRITERS = {
    "probes/shared/files.py",  # the mechanism
    "probes/shared/locks.py",  # lock files without content
    "buildtool/files.py",
    "probes/fit/measured/caps.py",  # files of /proc
    "probes/fit/measured/cgroups.py",  # files of a cgroup
    "probes/fit/measured/nursery.py",  # a pipe to the parent process
    "probes/run/journal.py",  # appends to a file that it holds locked
    "probes/run/lock.py",  # a lock file without content
    "probes/run/child.py",  # a pipe to the parent process
    "probes/watch/recorder.py",  # appends to files that were asked for, a line at a time
    "buildtool/command.py",  # the log of a program that outlives us
    "buildtool/engine/provision.py",  # a scratch directory for apt
    "buildtool/builder/context.py",  # fills a scratch directory that is renamed as a whole
    "buildtool/builder/wheels.py",  # pip's scratch directory
    "buildtool/audit/inspect/gpucode.py",  # a file without a name
    # these write into what `replacing` or `scratch` gave them
    "buildtool/prune/images.py",
    "buildtool/prune/layerfile.py",
    "buildtool/prune/archives.py",
    "probes/placement/packing/disk/cache.py",  # a partial file of `replacing`, by descriptor
    "buildtool/prune/manifest.py",  # the journal of a prune, O_EXCL
}
WRITES = re.compile(
    r"""\.write_(text|bytes)\(|open\([^)]*["'][wax]b?\+?b?["']"""  # by Path, by open()
    r"|O_CREAT|O_WRONLY|\btempfile\."
)
IS_OURS = re.compile(r"\bfiles\.write_text\(")


SPEAKING = {"probes/shared/output.py", "buildtool/progress.py"}  # these alone write for people, and quote it
FLUSHING = {"probes/shared/entry.py"}


def test_nothing_reaches_a_terminal_unquoted() -> None:
    for path in MODULES:
        relative = path.relative_to(ROOT).as_posix()
        for call in nodes(path, ast.Call, where=r"\bprint\("):
            assert not (
                isinstance(call.func, ast.Name) and call.func.id == "print" and relative not in SPEAKING
            ), f"{relative} prints: only {SPEAKING} may"
        for node in nodes(path, ast.Attribute, where=r"\.std(?:out|err)\b"):
            if node.attr in ("stdout", "stderr") and is_sys(node.value):
                assert relative in SPEAKING | FLUSHING, f"{relative} uses {ast.unparse(node)}"


def is_sys(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "sys"


def allowed(relative: str, places: set[str]) -> bool:
    return any(relative == place or (place.endswith("/") and relative.startswith(place)) for place in places)


def test_module_keeps_to_its_layer() -> None:
    for path in MODULES:
        relative = path.relative_to(ROOT).as_posix()
        program = relative.split("/")[0]
        across = ACROSS[program] | FORWARDING.get(relative, set())
        for name in imports(path):
            top = name.split(".")[0]
            if top in GATES:
                assert allowed(relative, GATES[top]), f"{relative} imports {name}: only {GATES[top]} may"
            if top in ACROSS and top != program and name != top:
                ok = any(name == a or name.startswith(a + ".") for a in across)
                assert ok, f"{relative} imports {name} of the other program"
            if allowed(relative, THOUGHT):
                assert name not in ACTING, f"{relative} thinks, {name} acts"


def test_the_container_has_what_the_probes_import() -> None:
    for path in MODULES:
        relative = path.relative_to(ROOT).as_posix()
        tops = {name.split(".")[0] for name in imports(path)}
        if relative.startswith("probes/"):
            assert tops <= {"probes", *GATES, *sys.stdlib_module_names, "_typeshed"}, relative
        if relative.startswith("probes/shared/"):
            beside = {name for name in imports(path) if name.split(".")[0] in ACROSS}
            assert all(name.startswith(SHARED) for name in beside | {SHARED}), f"{relative} imports {beside}"


def test_only_the_verb_that_draws_a_page_imports_what_draws_it() -> None:
    page = "probes.report.page"
    users = {
        name_of(path)
        for path in MODULES
        if any(name.startswith(page) for name in imports(path)) and not name_of(path).startswith(page)
    }
    assert users == {"probes.verbs"}


def test_a_command_imports_no_other_command() -> None:
    commands = "buildtool.commands."
    for path in MODULES:
        if name_of(path).startswith(commands):
            assert not [name for name in imports(path) if name.startswith(commands)], path


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    list(graphlib.TopologicalSorter(architecture.package_graph()).static_order())


def test_folders_are_small_and_shallow() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for name in architecture.module_graph():
        folders[name.rpartition(".")[0]].append(name)
    for folder, names in folders.items():
        modules = [name for name in names if not name.endswith(".__main__")]
        assert len(modules) <= MOST_MODULES, f"{folder} has {len(modules)} modules"
        chain = architecture.longest_chain(names)
        assert len(chain) <= LONGEST_CHAIN, f"{folder}: {' -> '.join(chain)}"


def test_a_module_name_says_one_thing() -> None:
    verbs = "buildtool.commands."
    names = [name for name in architecture.module_graph() if not name.startswith(verbs)]
    leaves = Counter(name.rpartition(".")[2] for name in names if not name.endswith("__main__"))
    assert {leaf for leaf, times in leaves.items() if times > 1} <= set(SAME_MEANING)


def test_the_diagram_shows_the_imports_as_they_are() -> None:
    assert architecture.drawn()[1] == architecture.diagram(), "run: python tests/unit/architecture.py"


def test_the_page_names_every_package() -> None:
    page = architecture.PAGE.read_text()
    packages = {path.parent.relative_to(ROOT).as_posix() for path in MODULES}
    rows = set(re.findall(r"^\| `((?:buildtool|probes)[a-z/]*)/` \|", page, re.MULTILINE))
    assert rows == packages


def test_a_wheel_has_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in MODULES}
    assert set(listed) == folders | {"buildtool.images"}


def test_files_are_written_in_one_way() -> None:
    for path in MODULES:
        relative = path.relative_to(ROOT).as_posix()
        if relative not in WRITERS and WRITES.search(text := path.read_text()):
            lines = [line for line in text.splitlines() if WRITES.search(IS_OURS.sub("", line))]
            assert not lines, (
                f"{relative} writes files by itself: buildtool/files.py or probes/shared/files.py does it"
            )


def test_no_text_is_read_or_written_in_the_users_own_encoding() -> None:
    """In a locale such as C without its coercion, that is ASCII, and our own files hold more than that."""
    for path in MODULES:
        unsaid = [
            node.lineno
            for node in nodes(path, ast.Call, where=r"\.(?:read_text\(\)|write_text\()")
            if isinstance(node.func, ast.Attribute)
            if (node.func.attr, len(node.args)) in (("read_text", 0), ("write_text", 1))
            if not any(word.arg == "encoding" for word in node.keywords)
        ]
        assert not unsaid, f"{path.relative_to(ROOT)} names no encoding in lines {unsaid}"

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
    "shtab": {"buildtool/cli/completion.py"},
    "yaml": {"buildtool/core/yaml_text.py"},
    "jsonschema": {"buildtool/build/catalog.py"},
    "subprocess": {"buildtool/core/command.py", "probes/measure/supervisor.py"},
    "tabulate": {"buildtool/audit/text.py", "probes/reports/text.py"},
    "torch": {
        "probes/fit/trial.py",
        "probes/fit/step.py",
        "probes/placement/architectures.py",
        "probes/placement/loading/",
        "probes/placement/packing/",
        "probes/placement/models/modules.py",
        "probes/placement/runtime/",
        "probes/measure/device.py",
        "probes/measure/placement_row.py",
        "probes/measure/placement_baselines.py",
        "probes/hardware/torch_build.py",
        "probes/throughput/top_speed.py",
        "probes/throughput/direct/torch_runner.py",
        "probes/throughput/direct/onnx_runner.py",
        "probes/throughput/direct/test_models.py",
    },
    "rich": {"probes/watch/screen.py"},
    "triton": {"probes/placement/packing/kernels/"},
    "matplotlib": {"probes/report/page/"},
    "dockerfile": {"buildtool/doctor/lint/dockerfiles.py"},
    "packaging": {"buildtool/doctor/lint/pip.py"},
    "tree_sitter": {"buildtool/doctor/lint/shell_words.py"},
    "tree_sitter_bash": {"buildtool/doctor/lint/shell_words.py"},
    "accelerate": {"probes/measure/placement_baselines.py"},
    "onnxruntime": {"probes/throughput/direct/onnx_runner.py"},
    "transformers": {"probes/placement/architectures.py", "probes/placement/models/from_config.py"},
    "peft": {"probes/fit/step.py"},
}
# program -> what of the other program it may import. Labels and JSON go between them; this is the vocabulary.
SHARED = "probes.shared"
ACROSS: dict[str, set[str]] = {"buildtool": {SHARED}, "probes": set()}
FORWARDING = {
    "buildtool/cli/probe.py": {"probes.cli.program"},  # `weir probe ...`
    # a host is read with the probes' readers of kernel files, which need the standard library alone
    "buildtool/doctor/gather.py": {"probes.machine", "probes.hardware.facts"},
    "buildtool/doctor/host.py": {"probes.hardware.facts"},
    "buildtool/doctor/text.py": {"probes.hardware.facts"},
}
# thought: values in, values out; may not import any of the modules that act ("dir/": every module below)
THOUGHT = {
    "buildtool/core/errors.py",
    "buildtool/core/model.py",
    "buildtool/core/json_text.py",
    "buildtool/audit/count/",
    "buildtool/audit/inspect/",
    "buildtool/audit/judge/",
    "buildtool/audit/read/",
    "buildtool/audit/report/",
    "buildtool/audit/tar/",
    "buildtool/build/plan.py",
    "buildtool/doctor/advice.py",
    "buildtool/doctor/compatibility.py",
    "buildtool/doctor/host.py",
    "buildtool/doctor/lint/",
    "buildtool/doctor/lint/report.py",
    "buildtool/doctor/routes.py",
    "buildtool/engine/client.py",
    "buildtool/engine/bakefile.py",
    "buildtool/engine/proof.py",
    "buildtool/engine/reference.py",
    "buildtool/gpucode/",
    "buildtool/prune/images.py",
    "probes/fit/answering/",
    "probes/fit/question.py",
    "probes/fit/predicted/",
    "probes/fit/search.py",
    "probes/hardware/snapshot.py",
    "probes/hardware/expectation.py",
    "probes/hardware/sysfs.py",
    "probes/hardware/host.py",
    "probes/measure/breakeven.py",
    "probes/measure/background_load.py",
    "probes/measure/workbench.py",
    "probes/measure/spill.py",
    "probes/measure/sampling.py",
    "probes/measure/scenarios.py",
    "probes/measure/transfer.py",
    "probes/placement/models/description.py",
    "probes/placement/packing/format.py",
    "probes/placement/models/reading.py",
    "probes/placement/planner/",
    "probes/placement/runtime/host_memory.py",
    "probes/reports/plan.py",
    "probes/placement/plan_file.py",
    "probes/placement/types.py",
    "probes/measure/placement_ways.py",
    "probes/records/",
    "probes/report/",
    "probes/measure/catalog.py",
    "probes/core/codec.py",
    "probes/core/quoting.py",
    "probes/core/units.py",
    "probes/throughput/ceiling.py",
    "probes/throughput/direct/scanned.py",
    "probes/throughput/direct/knee.py",
    "probes/throughput/direct/repeats.py",
    "probes/throughput/served/scanned.py",
    "probes/throughput/served/level.py",
    "probes/throughput/served/payload.py",
    "probes/throughput/served/client.py",
    "probes/throughput/served/answers.py",
    "probes/throughput/showing/",
    "probes/watch/allocator.py",
    "probes/watch/watcher.py",
    "probes/watch/recording.py",
    "probes/watch/totals.py",
    "probes/reports/watch.py",
    "probes/throughput/direct/scan.py",
}
ACTING = {
    "buildtool.core.command",
    "buildtool.build.pipeline",
    "buildtool.build.rootfs",
    "buildtool.build.sources",
    "buildtool.build.wheels",
    "buildtool.doctor.gather",
    "buildtool.engine.buildx",
    "buildtool.engine.client",
    "buildtool.engine.connection",
    "buildtool.engine.host",
    "buildtool.engine.provision",
    "probes.fit.limits",
    "probes.fit.trial",
    "probes.fit.worker",
    "probes.fit.step",
    "probes.hardware.host",
    "probes.hardware.nvml",
    "probes.hardware.snapshot",
    "probes.hardware.sysfs",
    "probes.hardware.torch_build",
    "probes.measure.device",
    "probes.measure.background_load",
    "probes.watch.command",
    "probes.watch.metrics_server",
    "probes.watch.recording",
    "probes.watch.readers",
    "probes.placement.architectures",
    "probes.placement.checkpoint",
    "probes.placement.loading",
    "probes.placement.read_ahead",
    "probes.measure.placement_row",
    "probes.measure.journal",
    "probes.measure.supervisor",
    "probes.throughput.top_speed",
    "probes.throughput.served.client",
    "probes.throughput.direct.worker",
    "probes.throughput.direct.torch_runner",
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


# who may open a file for writing by himself; everybody else goes through buildtool/core/files.py
WRITERS = {
    "probes/core/files.py",  # the mechanism
    "probes/core/files.py",  # lock files without content
    "buildtool/core/files.py",
    "probes/fit/limits.py",  # files of /proc
    "probes/fit/limits.py",  # files of a cgroup
    "probes/fit/worker.py",  # a pipe to the parent process
    "probes/measure/journal.py",  # appends to a file that it holds locked
    "probes/measure/journal.py",  # a lock file without content
    "probes/measure/worker.py",  # a pipe to the parent process
    "probes/watch/recording.py",  # appends to files that were asked for, a line at a time
    "buildtool/core/command.py",  # the log of a program that outlives us
    "buildtool/engine/provision.py",  # a scratch directory for apt
    "buildtool/build/pipeline.py",  # fills a scratch directory that is renamed as a whole
    "buildtool/build/wheels.py",  # pip's scratch directory
    "buildtool/image/gpu_code.py",  # a file without a name
    # these write into what `replacing` or `scratch` gave them
    "buildtool/prune/images.py",
    "buildtool/prune/archives.py",
    "probes/placement/packing/cache.py",  # a partial file of `replacing`, by descriptor
    "buildtool/prune/manifest.py",  # the journal of a prune, O_EXCL
}
WRITES = re.compile(
    r"""\.write_(text|bytes)\(|open\([^)]*["'][wax]b?\+?b?["']"""  # by Path, by open()
    r"|O_CREAT|O_WRONLY|\btempfile\."
)
IS_OURS = re.compile(r"\bfiles\.write_text\(")


SPEAKING = {
    "probes/core/output.py",
    "buildtool/core/progress.py",
}  # these alone write for people, and quote it
FLUSHING = {"probes/core/entry.py"}


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
    assert users == {"probes.cli.reports"}


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
                f"{relative} writes files by itself: buildtool/core/files.py or probes/core/files.py does it"
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

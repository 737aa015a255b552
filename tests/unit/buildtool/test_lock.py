"""The lock file keeps inputs by content and notices when the spec asks for others."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool import catalog
from buildtool.errors import ConfigError
from buildtool.lock import Lock, spec_sha256
from buildtool.model import Budget, PinnedBase, Resolved, TorchBuild, Wheel

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


def test_a_wheel_file_name_gives_distribution_and_version() -> None:
    assert (WHEEL.distribution, WHEEL.version) == ("torch", "2.13.0+cpu")
    assert ENTRY.torch_version == "2.13.0+cpu"
    assert Wheel("typing_extensions-4.1-py3-none-any.whl", "", 1).distribution == "typing-extensions"


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

"""The doctor's diagnosis follows from facts alone."""

from dataclasses import replace

import pytest

from buildtool.core.errors import EngineUnavailable
from buildtool.engine.client import EngineInfo
from buildtool.engine.host import Facts, diagnose, free_image_bytes
from probes.core.unknown import Unknown

WELL = Facts(
    engine=EngineInfo("26.1", True, "here", "/var/lib/docker", ()),
    buildx="0.13",
    compose="2.26.1",
    mmdebstrap=True,
    free_disk_bytes=10**12,
)


def test_a_well_host_needs_nothing() -> None:
    assert list(diagnose(WELL)) == []


def test_a_missing_engine_and_plugin_are_missing_and_have_a_next_step() -> None:
    rows = diagnose(replace(WELL, engine=EngineUnavailable("no engine", "start it"), buildx=None))
    missing = {row.thing: row.next_step for row in rows if row.fails}
    assert set(missing) == {"engine", "buildx"}
    assert all(missing.values())


def test_what_only_some_need_is_a_note() -> None:
    rows = diagnose(replace(WELL, mmdebstrap=False, free_disk_bytes=1))
    assert {row.thing: row.fails for row in rows} == {"mmdebstrap": False, "disk": False}


def test_a_disk_that_cannot_be_measured_is_neither_roomy_nor_full() -> None:
    (row,) = diagnose(replace(WELL, free_disk_bytes=Unknown("it is far")))
    assert (row.thing, row.fails, row.state) == ("disk", False, "unknown: it is far")


def test_no_engine_at_an_address_says_nothing_about_this_hosts_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2376")
    assert isinstance(free_image_bytes(EngineUnavailable("no engine")), Unknown)
    assert isinstance(free_image_bytes(EngineInfo("26.1", True, "here", "/", ())), Unknown)


def test_the_classic_image_store_is_named() -> None:
    engine = EngineInfo("24.0", False, "here", "/", ())
    (row,) = diagnose(replace(WELL, engine=engine))
    assert (row.thing, row.fails) == ("engine", False)

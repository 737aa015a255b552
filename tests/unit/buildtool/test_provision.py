"""How an engine can be had is decided from facts about the host alone."""

import pytest

from buildtool.errors import EngineUnavailable, Exit
from buildtool.provision import Host, plan_install


def host(distribution: str = "debian", codename: str = "bookworm", **changes: bool) -> Host:
    facts = {"is_root": True, "buildx_in_suite": False, "has_engine": False} | changes
    return Host(distribution, codename, **facts)


def test_debian_12_takes_the_engine_from_debian_13() -> None:
    found = plan_install(host())
    assert found.suite == "trixie"
    assert {"docker.io", "docker-buildx", "docker-compose", "mmdebstrap"} <= set(found.packages)


def test_a_debian_that_has_buildx_uses_its_own_packages() -> None:
    assert plan_install(host(codename="trixie", buildx_in_suite=True)).suite is None


def test_ubuntu_uses_its_own_names() -> None:
    assert "docker-compose-v2" in plan_install(host("ubuntu", "noble")).packages


@pytest.mark.parametrize("where", [host("fedora", ""), host(is_root=False), host(codename="buster")])
def test_elsewhere_a_person_is_told_what_to_do(where: Host) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        plan_install(where)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert caught.value.hint

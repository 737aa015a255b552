"""How an engine can be had is decided from facts about the host alone."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from buildtool.core.errors import EngineForbidden, EngineUnavailable, EnvironmentMissing, Exit
from buildtool.engine import provision
from buildtool.engine.provision import ALSO_NEEDED, Host, InstallPlan, may_choose_store, plan_install


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
def test_elsewhere_a_user_is_shown_what_to_do(where: Host) -> None:
    with pytest.raises(EngineUnavailable) as caught:
        plan_install(where)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert caught.value.hint


class World:
    """Simulates a host: what was done to it, and whether its engine answers."""

    def __init__(self, found: Host, why: EngineUnavailable | None) -> None:
        self.found, self.why = found, why
        self.done: list[str] = []

    def connect(self, **_: object) -> SimpleNamespace:
        if self.why:
            raise self.why
        return SimpleNamespace(info=lambda: SimpleNamespace(version="1"))

    def install(self, _plan: InstallPlan, _say: object, *, verbose: bool) -> None:
        self.done.append("install")

    def spawn(self, *_: object, **__: object) -> None:
        self.done.append("start")
        self.why = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., World]:
    def make(found: Host, why: EngineUnavailable | None = None) -> World:
        made = World(found, why or EngineUnavailable("no Docker engine answers"))
        monkeypatch.setattr(provision, "Engine", made.connect)
        monkeypatch.setattr(provision, "install", made.install)
        monkeypatch.setattr(provision, "spawn", made.spawn)
        monkeypatch.setattr(provision, "run", made.spawn)
        monkeypatch.setattr(provision, "find", lambda _name: Path("/bin/true"))
        monkeypatch.setattr(provision, "describe_host", lambda: found)
        monkeypatch.setattr(provision, "DAEMON_JSON", tmp_path / "etc/daemon.json")
        for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        return made

    return make


def ensure() -> None:
    provision.ensure_engine(lambda _line: None, assume_yes=True)


def test_starting_a_stopped_engine_does_not_hide_its_images_in_another_store(
    world: Callable[..., World], tmp_path: Path
) -> None:
    stopped = world(host(has_engine=True))
    ensure()
    assert stopped.done == ["start"]
    assert not (tmp_path / "etc").exists()


def test_an_engine_that_we_install_has_its_settings_before_its_package_starts_it(
    world: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = world(host())
    settings: list[str] = []
    monkeypatch.setattr(
        provision, "install", lambda *_, **__: settings.append(provision.DAEMON_JSON.read_text())
    )
    ensure()
    assert "containerd-snapshotter" in settings[0]
    assert bare.done == ["start"]


def test_an_install_that_fails_leaves_no_settings_behind(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world(host())

    def fail(*_: object, verbose: bool) -> None:
        raise EnvironmentMissing("apt can't")

    monkeypatch.setattr(provision, "install", fail)
    with pytest.raises(EnvironmentMissing, match="apt can't"):
        ensure()
    assert not provision.DAEMON_JSON.exists()


@pytest.mark.parametrize("had", ["has_engine", "has_settings", "has_images"])
def test_settings_are_written_only_where_there_was_never_an_engine(had: str) -> None:
    assert may_choose_store(host())
    assert not may_choose_store(host(**{had: True}))


def test_for_a_stopped_engine_no_other_engine_is_installed() -> None:
    assert plan_install(host(has_engine=True)) == InstallPlan(ALSO_NEEDED, None)


@pytest.mark.parametrize("name", ["DOCKER_HOST", "DOCKER_CONTEXT"])
def test_an_engine_elsewhere_that_does_not_answer_starts_none_here(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here = world(host())
    monkeypatch.setenv(name, "tcp://far:2375")
    with pytest.raises(EngineUnavailable):
        ensure()
    assert here.done == []


def test_an_engine_that_we_may_not_use_is_neither_installed_nor_started_again(
    world: Callable[..., World],
) -> None:
    here = world(host(is_root=False), EngineForbidden("permission denied"))
    with pytest.raises(EngineForbidden):
        ensure()
    assert here.done == []


@pytest.mark.parametrize(("typed", "agreed"), [("", True), ("y", True), ("n", False), (None, False)])
def test_ctrl_d_at_the_question_is_a_no(
    monkeypatch: pytest.MonkeyPatch, typed: str | None, agreed: bool
) -> None:
    def answer(_question: str) -> str:
        if typed is None:
            raise EOFError
        return typed

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", answer)
    assert provision._confirmed() is agreed


@pytest.mark.parametrize("said", [{"ID": "debian", "VERSION_CODENAME": "trixie"}, {"ID": "arch"}, None])
def test_a_host_without_a_distributions_name_is_described_all_the_same(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str] | None
) -> None:
    def release() -> dict[str, str]:
        if said is None:
            raise OSError("no os-release")
        return said

    monkeypatch.setattr(provision.platform, "freedesktop_os_release", release)
    monkeypatch.setattr(provision, "_has_candidate", lambda _package: False)
    found = provision.describe_host()
    known = said or {}
    assert (found.distribution, found.codename) == (
        known.get("ID", "unknown"),
        known.get("VERSION_CODENAME", "unknown"),
    )


def test_apt_waits_for_another_one_that_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(provision, "run_streaming", lambda words, **_more: ran.append(words))
    provision.install(InstallPlan(("docker.io",), None), lambda _line: None)
    assert [words for words in ran if "DPkg::Lock::Timeout=300" not in words] == []
    assert len(ran) == 2

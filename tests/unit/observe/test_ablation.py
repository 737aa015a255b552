"""The least that a service needs: nothing of it can be left out, and nothing else is in it."""

import random
from pathlib import Path
from typing import Any

import pytest

from buildtool.cli import ablate
from buildtool.cli.program import main
from buildtool.core.command import CommandFailed
from buildtool.core.errors import ConfigError
from buildtool.engine import compose
from buildtool.observe.ablation import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    GPU,
    NEW_PRIVILEGES,
    PRIVILEGED,
    WRITABLE,
    Grant,
    granted,
    grants_of,
    least,
    names_of,
    networks_of_its_own,
    without_host_values,
    without_privileged,
)


def test_a_service_that_has_only_a_build_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablate, "resolved", lambda *_: {"services": {"s": {"build": "."}}})
    assert main(["ablate", str(tmp_path / "compose.yaml"), "s"]) == 2
    assert "s names no image" in capsys.readouterr().err


def test_no_volume_without_a_name_is_left_by_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`down` leaves them, and with --volumes it would remove those of the service itself."""
    calls: list[list[str]] = []

    def run(words: list[str]) -> None:
        calls.append(words[8:])
        raise CommandFailed(words, 1, "")

    monkeypatch.setattr(compose, "run", run)
    with pytest.raises(CommandFailed), compose.project(tmp_path, {}, "p", "s"):
        pass
    assert calls == [["rm", "--stop", "--force", "--volumes"], ["down", "-t", "10", "--remove-orphans"]]


def test_no_service_passes_for_an_option_of_compose() -> None:
    with pytest.raises(ConfigError):
        compose.resolved([Path("compose.yaml")], "--output=x")


def test_a_start_is_not_reached_by_those_who_ask_for_the_service() -> None:
    addresses = {"name": "p_b", "ipam": {"config": [{"subnet": "10.9.0.0/24"}]}}
    external = {"name": "c", "external": True}
    networks = {"a": {"name": "p_a", "ipam": {}, "internal": True}, "b": addresses, "c": external}
    assert networks_of_its_own(networks) == {
        "a": {"ipam": {}, "internal": True}, "b": addresses, "c": external,
    }  # fmt: skip


SERVICE: dict[str, Any] = {
    "image": "x",
    "command": ["a"],
    "cap_drop": ["NET_RAW"],
    "cap_add": ["SYS_NICE", "CAP_CHOWN"],
    "devices": [{"source": "/dev/kfd", "target": "/dev/kfd", "permissions": "rwm"}],
    "group_add": ["44", "109"],
    "volumes": [{"type": "bind", "source": "/m", "target": "/models"}],
    "tmpfs": ["/tmp"],
    "security_opt": ["seccomp=unconfined"],
    "pid": "host",
    "ipc": "private",
    "deploy": {"resources": {"reservations": {"devices": [{"driver": "nvidia"}]}, "limits": {"cpus": 1}}},
}


def test_every_grant_is_found_also_what_docker_gives_unasked() -> None:
    grants = grants_of(SERVICE)
    names = {grant.item for grant in grants if grant.key == "cap_add"}
    assert names == (DEFAULT_CAPABILITIES - {"NET_RAW"}) | {"SYS_NICE", "CAP_CHOWN".removeprefix("CAP_")}
    assert {WRITABLE, NEW_PRIVILEGES, GPU, Grant("pid", "host")} <= set(grants)
    assert len([grant for grant in grants if grant.key in ("devices", "group_add", "volumes", "tmpfs")]) == 5


def test_nothing_granted_is_nothing_granted() -> None:
    bare = granted(SERVICE, ())
    assert bare == {
        "image": "x", "command": ["a"], "ipc": "private", "cap_drop": ["ALL"], "read_only": True,
        "security_opt": ["no-new-privileges:true"],
        "deploy": {"resources": {"reservations": {}, "limits": {"cpus": 1}}},
    }  # fmt: skip
    assert grants_of(bare) == (), "and a service without grants has none to try"
    assert SERVICE["deploy"]["resources"]["reservations"]["devices"], "the original stays as it was"


def test_all_granted_is_what_the_service_had() -> None:
    whole = granted(SERVICE, grants_of(SERVICE))
    for key in ("devices", "group_add", "volumes", "tmpfs", "security_opt", "pid", "deploy"):
        assert whole[key] == SERVICE[key]
    assert "read_only" not in whole
    assert set(grants_of(whole)) == set(grants_of(SERVICE))


def test_a_hardened_service_is_granted_nothing() -> None:
    hardened = {"cap_drop": ["ALL"], "read_only": True, "security_opt": ["no-new-privileges:true"]}
    assert grants_of(hardened) == ()


def test_privileged_is_one_grant_or_all_of_its_parts() -> None:
    service = {"privileged": True, "security_opt": ["no-new-privileges:true"]}
    assert grants_of(service) == (PRIVILEGED, WRITABLE)
    parts = grants_of(without_privileged(service, ["/dev/kfd"]), capabilities=("CHOWN", "BPF"))
    assert {grant.item for grant in parts if grant.key == "cap_add"} == {"CHOWN", "BPF"}
    assert "devices: /dev/kfd:/dev/kfd:rwm" in set(names_of(without_privileged(service, ["/dev/kfd"]), parts))
    assert len(CAPABILITIES) == 41


def test_the_least_is_found_whatever_is_needed() -> None:
    draw = random.Random(5)
    for _ in range(300):
        grants = [Grant("cap_add", str(number)) for number in range(draw.randint(0, 40))]
        needed = frozenset(draw.sample(grants, draw.randint(0, min(6, len(grants)))))
        starts = 0

        def passes(kept: frozenset[Grant], needed: frozenset[Grant] = needed) -> bool:
            nonlocal starts
            starts += 1
            return needed <= kept

        assert set(least(grants, passes)) == needed
        assert starts <= 8 + 16 * (1 + len(needed))


def test_of_two_ways_that_serve_one_is_kept() -> None:
    """A tmpfs or a root that may be written: either serves, both are too much."""
    grants = [Grant("tmpfs", "0"), WRITABLE, Grant("cap_add", "CHOWN")]
    assert len(least(grants, lambda kept: bool({Grant("tmpfs", "0"), WRITABLE} & kept))) == 1


def test_what_works_better_with_less_is_still_minimal() -> None:
    a, b, c = (Grant("cap_add", name) for name in "ABC")

    def passes(kept: frozenset[Grant]) -> bool:
        return kept in ({a, b, c}, {a, b}, {a}, {b, c})

    found = frozenset(least([a, b, c], passes))
    assert passes(found)
    assert not any(passes(found - {each}) for each in found)


def test_secrets_of_the_host_are_not_printed() -> None:
    service = {"environment": {"HF_TOKEN": "s3cret", "MODE": "x", "UNSET": None}}
    shown = without_host_values(service, {"HF_TOKEN": "s3cret", "MODE": "y"})
    assert shown == {"environment": {"HF_TOKEN": None, "MODE": "x", "UNSET": None}}

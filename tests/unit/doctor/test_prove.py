"""The proof of an image on this host's card: what is passed on, and what is made of the answer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_trees import ENGINE, Card, Case, host_of

from buildtool.cli import doctor
from buildtool.core.errors import EnvironmentMissing, ProofFailed
from buildtool.doctor.host import Node
from buildtool.doctor.prove import Check, checks_of, devices_of, lines
from buildtool.engine import client
from buildtool.engine.client import Devices, RunResult, device_options
from probes.core.unknown import Unknown

NODES = (Node("/dev/kfd", 0, 992, "render", "0660"), Node("/dev/dri/renderD128", 0, 993, "render", "0660"))
ANSWER = {"machine": {}, "checks": [{"name": "a copy", "holds": True, "said": "1 MiB"}]}


def test_an_amd_card_is_passed_on_with_numeric_groups(tmp_path: Path) -> None:
    passed = devices_of(host_of(Case("x", (Card("1002:744c", 110000),), nodes=NODES), tmp_path))
    assert passed == Devices(paths=("/dev/kfd", "/dev/dri/renderD128"), groups=("992", "993"))
    assert device_options(passed)["devices"][0] == "/dev/kfd:/dev/kfd"


@pytest.mark.parametrize(("runtimes", "driver"), [(("nvidia", "runc"), ""), (("runc",), "cdi")])
def test_nvidia_is_passed_on_by_its_runtime_or_by_cdi(
    runtimes: tuple[str, ...], driver: str, tmp_path: Path
) -> None:
    case = Case(
        "x",
        (Card("10de:2330", driver="nvidia"),),
        nvidia_driver="580.95.05",
        engine=replace(ENGINE, runtimes=runtimes),
        files={"etc/cdi/n.json": '{"kind": "nvidia.com/gpu"}'},
    )
    (request,) = device_options(devices_of(host_of(case, tmp_path)))["device_requests"]
    assert request.driver == driver
    assert (request.count, request.capabilities) == ((0, []) if driver else (-1, [["gpu"]]))  # all of them
    assert bool(request.device_ids) == bool(driver)


def test_without_an_engines_answer_a_card_is_passed_on_by_cdi_where_that_names_it(tmp_path: Path) -> None:
    case = Case(
        "x",
        (Card("10de:2330", driver="nvidia"),),
        nvidia_driver="580.95.05",
        engine=Unknown("no answer"),
        files={"etc/cdi/n.json": '{"kind": "nvidia.com/gpu"}'},
    )
    assert devices_of(host_of(case, tmp_path)) == Devices(cdi=("nvidia.com/gpu=all",))


def test_no_card_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="no card is here"):
        devices_of(host_of(Case("x", ()), tmp_path))


def test_checks_are_read_after_what_libraries_print() -> None:
    assert checks_of(0, "warning\n" + json.dumps(ANSWER), "") == (Check("a copy", holds=True, said="1 MiB"),)


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"checks": {}}', '{"checks": [{"name": 1}]}', '{"checks": []}', "{" * 5000]
)
def test_an_answer_without_checks_is_a_failed_proof(text: str) -> None:
    with pytest.raises(ProofFailed, match="tried nothing"):
        checks_of(1, text, "Traceback")


def test_hostile_texts_are_shown_escaped(tmp_path: Path) -> None:
    passed = devices_of(host_of(Case("x", (Card("1002:744c", 110000),), nodes=NODES), tmp_path))
    shown = lines("i:1", passed, [Check("a\x1b[2J", holds=False, said="b\u202e")])
    assert shown[1] == r"  a\x1b[2J: FAILS: b\u202e"


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 4)])
def test_the_verb_runs_the_images_own_doctor(
    holds: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(Case("x", (Card("1002:744c", 110000),), nodes=NODES), tmp_path)
    answer = json.dumps({"checks": [{"name": "a", "holds": holds, "said": "b"}]})
    seen: dict[str, Any] = {}

    class Fake:
        def run(self, image: str, command: list[str], *, devices: Devices) -> RunResult:
            seen.update(image=image, command=command, devices=devices)
            return RunResult(0, answer, "")

    monkeypatch.setattr(client, "Engine", Fake)
    assert doctor._prove("weir/rocm:latest", host) == code
    assert seen["command"][-3:] == ["probes", "doctor", "--json"]
    assert seen["devices"].groups == ("992", "993")

"""What the doctor reads of a host, beside what the probes' readers are tested for."""

import datetime
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from host_trees import Card, Case, host_of

from buildtool.doctor.advice import advise
from buildtool.doctor.compatibility import compatibility
from buildtool.doctor.gather import parse_torch_version, read_cdi_kinds, read_displays, read_pythons
from buildtool.doctor.host import Node, TorchBuild, User
from buildtool.doctor.text import answer_text
from probes.core.unknown import Unknown
from probes.hardware.host import NOT_SEEN, container_kind
from probes.records.facts import Link, NvidiaCard


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_card_has_its_ids_driver_memory_and_link(tmp_path: Path) -> None:
    host = host_of(Case("x", (Card("1002:67e3", 80003, 4, lanes=8),)), tmp_path)
    (card,) = host.displays
    assert (card.product, card.driver, card.target, card.vram_bytes) == (
        "1002:67e3",
        "amdgpu",
        "gfx803",
        4 << 30,
    )
    assert (card.link, card.max_link) == (Link(3, 8), Link(4, 8))
    assert host.gpu_driver == "amdgpu 6.12.12"
    assert host.distribution == "Ubuntu 24.04.3 LTS"


def test_a_card_that_only_nvml_shows_is_found(tmp_path: Path) -> None:
    hidden = Unknown("not asked")
    card = NvidiaCard("RTX 4090", "0000:01:00.0", "sm_89", 24 << 30, 0, 0, hidden, Link(4, 16), hidden)
    (display,) = read_displays(tmp_path, (card,))
    assert (display.name, display.target, display.maker) == ("RTX 4090", "sm_89", "nvidia")
    host = replace(host_of(Case("x", (), wsl=True), tmp_path), displays=(display,))
    advice = advise(host, compatibility(), datetime.date(2026, 11, 21))
    assert advice.cards[0].best is not None
    assert advice.cards[0].best.torch == "2.14.0+cu130"
    assert "RTX 4090 (sm_89, 0000:01:00.0), VRAM 24.00 GiB, link Gen4 x16" in answer_text(host, advice, [])


def test_device_files_have_numeric_groups(tmp_path: Path) -> None:
    host = host_of(Case("x", (Card("1002:67e3", 80003),)), tmp_path)
    assert [node.path for node in host.nodes] == ["/dev/kfd", "/dev/dri/renderD128"]
    assert {type(node.group) for node in host.nodes} == {int}


@pytest.mark.parametrize(
    ("mode", "user", "opens"),
    [
        ("0660", User(1000, "ann", (993,)), True),
        ("0660", User(1000, "ann", (44,)), False),
        ("0666", User(1000, "ann", (44,)), True),
        ("0640", User(1000, "ann", (993,)), False),
        ("0600", User(7, "owner", (993,)), True),
        ("0060", User(7, "owner", (993,)), False),
        ("0000", User(0, "root", (0,)), True),
    ],
)
def test_who_may_open_a_device_file(mode: str, user: User, opens: bool) -> None:
    assert Node("/dev/kfd", 7, 993, "render", mode).opens_for(user) is opens


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None\n",
            TorchBuild("2.13.0+cpu", "", ""),
        ),
        (
            "__version__ = '2.9.1+rocm6.4'\nhip: str = '6.4.43484'\ncuda = None",
            TorchBuild("2.9.1+rocm6.4", "", "6.4.43484"),
        ),
        ("__version__: str = '2.14.0'\ncuda = '13.0'\n", TorchBuild("2.14.0", "13.0", "")),
    ],
)
def test_a_torch_is_known_by_its_version_file(text: str, found: TorchBuild) -> None:
    assert parse_torch_version(text) == found


@pytest.mark.parametrize(
    "text", ["", "def", "\x00", "cuda = '12'", "import os; os.abort()", f"__version__ = 0x{'f' * 6000}"]
)
def test_a_version_file_is_read_and_never_run(text: str) -> None:
    assert isinstance(parse_torch_version(text), Unknown)


def test_folders_that_may_not_be_searched_hold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an ordinary user meets them in `/`, and by an environment's name that was left by another one."""
    (tmp_path / "lost+found").mkdir()
    real = os.stat

    def refuse(path: object, *args: object, **more: object) -> os.stat_result:
        if "lost+found/" in str(path) or "run/secrets/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refuse)
    environment = {"VIRTUAL_ENV": str(tmp_path / "lost+found/venv")}
    assert read_pythons(tmp_path, environment, tmp_path) == ()
    assert container_kind(tmp_path) == NOT_SEEN


def test_pythons_are_found_in_the_usual_places_and_the_environment(tmp_path: Path) -> None:
    version = "__version__ = '2.14.0'\ncuda = '13.0'\n"
    lay(
        tmp_path,
        {
            "usr/bin/python3.12": "",
            "usr/bin/python3.12-config": "",
            "opt/conda/bin/python3.10": "",
            "opt/conda/lib/python3.10/site-packages/torch/version.py": version,
            "home/ann/project/.venv/bin/python3.11": "",
            "home/ann/project/.venv/pyvenv.cfg": "",
        },
    )
    found = read_pythons(tmp_path, {}, tmp_path / "home/ann/project")
    assert [one.place for one in found] == [
        "/home/ann/project/.venv/bin/python3.11",
        "/usr/bin/python3.12",
        "/opt/conda/bin/python3.10",
    ]
    assert found[2].torch == TorchBuild("2.14.0", "13.0", "")


def _pipe(place: Path) -> None:
    os.mkfifo(place)


def _endless(place: Path) -> None:
    place.symlink_to("/dev/zero")


def _large(place: Path) -> None:
    place.write_text("#" * 100_000)


def _nested(place: Path) -> None:
    place.write_text(f"__version__ = {'-' * 60_000}1\n")


@pytest.mark.parametrize("make", [_pipe, _endless, _large, _nested])
def test_a_version_file_that_somebody_planted_stops_nothing(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    lay(tmp_path, {"here/ve/bin/python3.11": "", "here/ve/pyvenv.cfg": ""})
    packages = tmp_path / "here/ve/lib/python3.11/site-packages/torch"
    packages.mkdir(parents=True)
    make(packages / "version.py")
    (found,) = read_pythons(tmp_path, {}, tmp_path / "here")
    assert found.torch == Unknown("its torch/version.py can't be read")


def test_what_is_no_cdi_specification_is_skipped_and_never_waited_for(tmp_path: Path) -> None:
    lay(tmp_path, {"etc/cdi/list.json": '{"kind": ["a"]}', "etc/cdi/map.yaml": "kind: {a: b}\n"})
    _pipe(tmp_path / "etc/cdi/pipe.yaml")
    _endless(tmp_path / "etc/cdi/endless.json")
    assert read_cdi_kinds(tmp_path, ("/etc/cdi",)) == ()


def test_cdi_specifications_are_read_in_both_forms_and_broken_ones_are_skipped(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [{', '.join(['*a'] * 9)}]\n" for i in range(3))
    lay(
        tmp_path,
        {
            "etc/cdi/amd.json": '{"kind": "amd.com/gpu"}',
            "etc/cdi/nvidia.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n",
            "etc/cdi/broken.json": "{",
            "etc/cdi/list.json": "[]",
            "etc/cdi/bomb.yaml": bomb,
            "etc/cdi/readme.txt": "kind: none",
        },
    )
    assert read_cdi_kinds(tmp_path, ("/etc/cdi", "/nowhere")) == ("amd.com/gpu", "nvidia.com/gpu")


def test_a_group_number_of_an_image_needs_no_name(tmp_path: Path) -> None:
    host = host_of(
        Case("x", (Card("1002:67e3"),), files={"etc/group": "garbage\n:::\nnobody:x:notanumber:\n"}), tmp_path
    )
    assert all(isinstance(node.group_name, Unknown) for node in host.nodes)


def test_a_host_that_does_not_say_what_it_is_is_unknown_with_the_reason(tmp_path: Path) -> None:
    host = host_of(Case("x", (), files={"etc/os-release": "NAME=Ubuntu\n"}), tmp_path)
    assert host.distribution == Unknown("no PRETTY_NAME in /etc/os-release")

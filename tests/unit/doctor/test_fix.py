"""`--fix` writes numeric groups, nodes and CDI devices for this host, and shows them first."""

import datetime
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from host_trees import ENGINE, Card, Case, host_of

from buildtool.cli.doctor import settings_text
from buildtool.core.errors import DataError
from buildtool.doctor.advice import advise
from buildtool.doctor.compatibility import compatibility
from buildtool.doctor.fix import ENV, OVERLAY, Change, changes, compose_files, env_text, shown
from buildtool.doctor.host import Host, Node

TODAY = datetime.date(2026, 11, 21)
RX7900 = Card("1002:744c", 110000, 24)
KFD = Node("/dev/kfd", 0, 992, "render", "0660")
D128, D129 = (Node(f"/dev/dri/renderD{n}", 0, 993, "render", "0660") for n in (128, 129))


def made(case: Case, root: Path, **before: str) -> dict[str, Change]:
    host = host_of(case, root)
    found = changes(host, advise(host, compatibility(), TODAY), dict(before))
    return {change.path: change for change in found}


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))
_Loader.add_constructor("!reset", lambda loader, node: None)


def services(change: Change) -> dict[str, dict[str, object]]:
    return dict(yaml.load(change.after, Loader=_Loader)["services"])


def test_one_card_needs_settings_alone_with_numbers(tmp_path: Path) -> None:
    found = made(Case("x", (RX7900,), nodes=(KFD, D128)), tmp_path)
    assert set(found) == {ENV}
    assert found[ENV].after == "RENDER_NODE=/dev/dri/renderD128\nRENDER_GID=993\nVIDEO_GID=992\n"


def test_two_cards_get_an_overlay_with_every_node(tmp_path: Path) -> None:
    found = made(Case("x", (RX7900, RX7900), nodes=(KFD, D128, D129)), tmp_path)
    one = services(found[OVERLAY])["api-rocm"]
    assert one == {
        "devices": ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"],
        "group_add": ["992", "993"],
    }
    assert "COMPOSE_FILE=compose.yaml:compose.here.yaml" in found[ENV].after


def test_a_cdi_device_replaces_nodes(tmp_path: Path) -> None:
    case = Case("x", (RX7900,), nodes=(KFD, D128), files={"etc/cdi/amd.json": '{"kind": "amd.com/gpu"}'})
    assert services(made(case, tmp_path)[OVERLAY])["probe-rocm"]["devices"] == ["amd.com/gpu=all"]


def test_nvidia_by_cdi_only_where_its_runtime_is_absent(tmp_path: Path) -> None:
    case = Case(
        "x",
        (Card("10de:2330", driver="nvidia"),),
        nvidia_driver="580.95.05",
        files={"etc/cdi/nvidia.json": '{"kind": "nvidia.com/gpu"}'},
    )
    found = services(made(case, tmp_path)[OVERLAY])
    assert found["api-cuda"] == {"deploy": None, "devices": ["nvidia.com/gpu=all"]}
    registered = replace(case, engine=replace(ENGINE, runtimes=("nvidia", "runc")))
    assert made(registered, tmp_path / "other") == {}


def test_an_old_compose_gets_no_overlay(tmp_path: Path) -> None:
    case = Case("x", (RX7900, RX7900), nodes=(KFD, D128, D129), engine=replace(ENGINE, compose="2.20.2"))
    assert set(made(case, tmp_path)) == {ENV}


def test_a_host_without_a_card_changes_nothing(tmp_path: Path) -> None:
    assert made(Case("x", ()), tmp_path) == {}
    assert "nothing to change" in shown([], written=True)


def test_other_settings_of_a_file_stay_and_ours_are_replaced_once() -> None:
    old = "# mine\nWEIR_PORT=9000\nexport RENDER_GID=1\nSECRET='a b'\nRENDER_GID=2\n"
    assert env_text(old, {"RENDER_GID": "993", "VIDEO_GID": "44"}) == (
        "# mine\nWEIR_PORT=9000\nRENDER_GID=993\nSECRET='a b'\nVIDEO_GID=44\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "compose.yaml:compose.here.yaml"),
        ("COMPOSE_FILE=compose.yaml:mine.yaml\r\n", "compose.yaml:mine.yaml:compose.here.yaml"),
        (
            "export COMPOSE_FILE='./compose.yaml:my #.yaml' # mine",
            "'./compose.yaml:my #.yaml:compose.here.yaml'",
        ),
        ("COMPOSE_FILE=mine.yaml", "compose.yaml:mine.yaml:compose.here.yaml"),
        ("COMPOSE_FILE=compose.yaml:compose.here.yaml:x", "compose.yaml:compose.here.yaml:x"),
        ("COMPOSE_PATH_SEPARATOR=;\nCOMPOSE_FILE=compose.yaml;x", "compose.yaml;x;compose.here.yaml"),
    ],
)
def test_overlays_of_the_user_stay_in_use(before: str, after: str) -> None:
    assert compose_files(before) == after


def test_a_value_with_an_unusual_line_separator_stays_one_value() -> None:
    text = "GREETING=a\u2028b\x0cc\x85d\nWINDOWS=1\r\n"
    assert env_text(text, {"RENDER_GID": "105"}) == f"{text}RENDER_GID=105\n"


@pytest.mark.parametrize(
    "content", [b"A=\xff\n", b"A=1\n" * 600_000, None, b"pipe"], ids=["bytes", "huge", "folder", "pipe"]
)
def test_settings_that_cannot_be_read_are_named_in_words(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / ".env"
    assert settings_text(file) is None
    if content is None:
        file.mkdir()
    elif content == b"pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"\.env: ") as refused:
        settings_text(file)
    assert "Errno" not in str(refused.value)
    assert "codec" not in str(refused.value)


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    case = Case("x", (RX7900, RX7900), nodes=(KFD, D128, D129))
    first = made(case, tmp_path)
    again = made(case, tmp_path / "again", **{path: change.after for path, change in first.items()})
    assert again == {}


def test_what_changes_is_shown_line_by_line() -> None:
    text = shown([Change(".env", "A=1\nB=2\n", "A=1\nB=3\n")], written=False)
    assert text == ".env:\n  - B=2\n  + B=3\nnothing was written (--dry-run)"


def test_an_override_of_the_best_route_is_set(tmp_path: Path) -> None:
    host: Host = host_of(Case("x", (Card("1002:73df", 100301),), nodes=(KFD, D128)), tmp_path)
    advice = advise(host, compatibility(), TODAY)
    only = replace(
        advice,
        cards=(replace(advice.cards[0], routes=tuple(r for r in advice.cards[0].routes if r.override)),),
    )
    (change,) = changes(host, only, {})
    assert "HSA_OVERRIDE_GFX_VERSION=10.3.0" in change.after


@pytest.mark.parametrize("path", ['/dev/dri/renderD"1', "/dev/dri/renderD${HOME}"])
def test_a_strange_path_stays_one_text(path: str, tmp_path: Path) -> None:
    case = Case("x", (RX7900, RX7900), nodes=(KFD, D128, replace(D129, path=path)))
    text = made(case, tmp_path)[OVERLAY].after
    assert yaml.load(text, Loader=_Loader)["services"]["api-rocm"]["devices"][2] == path.replace("$", "$$")

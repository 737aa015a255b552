"""The compatibility data: its form, that every cell has a source, and that contradictions are found."""

import copy
import datetime
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml
from contradictions import all_cells, contradictions

from buildtool.core.errors import DataError
from buildtool.core.shipped import IMAGES
from buildtool.doctor.compatibility import FILE, RANKS, compatibility, read

TODAY = datetime.date(2026, 11, 21)
WANTED = [
    "gfx803",
    "gfx900",
    "gfx906",
    "gfx90a",
    "gfx942",
    "gfx1010",
    "gfx1030",
    "gfx1031",
    "gfx1032",
    "gfx1100",
    "gfx1101",
    "gfx1102",
    "gfx1150",
    "gfx1151",
    "gfx1200",
    "gfx1201",
    "sm_50",
    "sm_60",
    "sm_61",
    "sm_70",
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_120",
]


@cache
def whole() -> dict[str, Any]:
    loaded = yaml.load(FILE.read_text(encoding="utf-8"), Loader=yaml.CBaseLoader)
    for source in loaded["sources"].values():
        source.update({"read": True} if "read" in source else {})
    loaded["schema_version"] = 1
    return dict(loaded)


@pytest.fixture
def raw() -> dict[str, Any]:
    return copy.deepcopy(whole())


def test_the_file_fits_its_schema(raw: dict[str, Any]) -> None:
    schema = json.loads(FILE.with_suffix(".schema.json").read_text())
    assert [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(raw)] == []


def test_nothing_in_the_file_contradicts_itself() -> None:
    assert contradictions(compatibility(), TODAY) == []


def test_every_wanted_target_is_there_with_an_answer_for_every_platform() -> None:
    data = compatibility()
    for name in WANTED:
        target = data.target(name)
        assert target is not None, name
        assert {p for answer in target.answers for p in answer.platforms} == {"linux", "wsl", "windows"}, name


def test_every_cell_has_a_source_with_a_date() -> None:
    data = compatibility()
    found = list(all_cells(data))
    assert len(found) > 60
    for place, cell in found:
        assert data.sources[cell.source].day <= TODAY, place


def test_no_source_is_a_package_registry() -> None:
    assert not re.search(r"//(www\.)?(pypi\.org|registry\.npmjs\.org|deb\.debian\.org)", FILE.read_text())


def test_a_cell_older_than_a_year_is_marked() -> None:
    data = compatibility()
    old = {name for name, source in data.sources.items() if source.is_stale(TODAY)}
    assert {"rocm-2.0-readme", "blas-6.4"} <= old
    assert "release-matrix" not in old


def test_a_named_variant_is_a_torch_source_of_the_catalog() -> None:
    names = set(re.findall(r"name: ([\w-]+)", (IMAGES / "variants.yaml").read_text()))
    used = {a.variant for target in compatibility().targets for a in target.answers if a.variant}
    assert used
    assert used <= names


Edit = Callable[[dict[str, Any]], object]


def _answer(raw: dict[str, Any], target: str, number: int) -> dict[str, Any]:
    (found,) = (one for one in raw["targets"] if one["id"] == target)
    return dict.__getitem__({"a": found["answers"][number]}, "a")


def _build(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict.__getitem__({"b": one}, "b") for one in raw["builds"] if one["id"] == name)


FAULTS: dict[str, tuple[Edit, str]] = {
    "a source that isn't listed": (
        lambda r: _build(r, "amd-nightly")["torch"].update(source="hearsay"),
        "hearsay is not in the list",
    ),
    "a source from the future": (lambda r: r["sources"]["vulkan"].update(date="2027-01-01"), "in the future"),
    "neither value nor reason": (
        lambda r: _build(r, "amd-nightly")["index"].pop("value"),
        "needs either a value or a reason",
    ),
    "both value and reason": (
        lambda r: _build(r, "amd-nightly")["index"].update(unknown="not seen"),
        "needs either a value or a reason",
    ),
    "Pythons the wrong way round": (
        lambda r: _build(r, "amd-nightly")["python"].update(value="3.14-3.11"),
        "is not a range",
    ),
    "Pythons that are no range": (
        lambda r: _build(r, "amd-nightly")["python"].update(value="3.11+"),
        "is not a range",
    ),
    "two targets of one name": (lambda r: r["targets"].append(r["targets"][0]), "target gfx803 occurs twice"),
    "two cards of one id": (lambda r: r["cards"].append(r["cards"][0]), "occurs twice"),
    "a card of an unknown target": (
        lambda r: r["cards"][0].update(target="gfx702"),
        "gfx702, which is not in the file",
    ),
    "answers out of order": (lambda r: r["targets"][0]["answers"].reverse(), "answers are not in the order"),
    "a platform without an answer": (
        lambda r: (
            r["targets"][0]["answers"][0].update(platforms=["linux"])
            or [a.update(platforms=["linux"]) for a in r["targets"][0]["answers"]]
        ),
        "no answer for wsl",
    ),
    "an official route and none": (
        lambda r: _answer(r, "gfx908", 1).update(platforms=["linux", "wsl", "windows"]),
        "official route and `none`",
    ),
    "a build that isn't there": (
        lambda r: _answer(r, "gfx908", 0).update(build="torch9"),
        "there is no build torch9",
    ),
    "a route without cells": (lambda r: _answer(r, "gfx803", 1).pop("python"), "no cell for python"),
    "none that runs": (lambda r: _answer(r, "gfx908", 1).update(runs="yes"), "`none` can't run"),
    "an official build without kernels": (
        lambda r: _answer(r, "gfx908", 0).update(build="torch2.7-rocm6.3"),
        "has no matrix library for gfx908",
    ),
    "a refusal of a build with kernels": (
        lambda r: _answer(r, "gfx908", 0).update(runs="no"),
        "and yet doesn't run",
    ),
    "an override to another instruction set": (
        lambda r: _answer(r, "gfx1031", 1).update(override="11.0.0"),
        "of another instruction set",
    ),
    "an override without its risk": (
        lambda r: _answer(r, "gfx1031", 1).update(says="It just works."),
        "what it risks is not said",
    ),
    "an override without kernels": (
        lambda r: _answer(r, "gfx1031", 1).update(build="torch2.7-rocm6.3"),
        "no matrix kernels for gfx1030",
    ),
    "an override that is empty and runs": (
        lambda r: _answer(r, "gfx1031", 1).update(override=""),
        "needs its version",
    ),
    "an override elsewhere": (
        lambda r: _answer(r, "gfx908", 0).update(override="9.0.8"),
        "an override outside its rank",
    ),
    "the same build twice": (
        lambda r: next(t for t in r["targets"] if t["id"] == "gfx90a")["answers"][1].update(
            build="torch2.13-rocm7.2"
        ),
        "names a build twice",
    ),
    "an answer without a source": (lambda r: _answer(r, "gfx908", 1).pop("source"), "no source"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_contradiction_is_found(name: str, raw: dict[str, Any]) -> None:
    edit, said = FAULTS[name]
    edit(raw)
    assert [fault for fault in contradictions(read(raw), TODAY) if said in fault], name


def test_a_damaged_file_is_named_with_its_place(raw: dict[str, Any]) -> None:
    raw["targets"][0]["answers"][0]["rank"] = "rumour"
    with pytest.raises(DataError, match=r"compatibility\.targets\[0\]\.answers\[0\]\.rank"):
        read(raw)


def test_ranks_are_the_issues() -> None:
    assert RANKS == ("official", "distribution", "community", "override", "none")

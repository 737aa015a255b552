"""What a variant asks for and what was found for it: sizes, names, and which variants a build takes."""

import json
import re
from dataclasses import replace

import pytest

from buildtool.core.errors import ConfigError
from buildtool.core.model import (
    Budget,
    Catalog,
    PinnedBase,
    Registry,
    Resolved,
    TorchBuild,
    TorchSource,
    Variant,
    Wheel,
    parse_size,
)
from buildtool.core.shipped import IMAGES

ONE = Variant("one", "s", "3.11", (Registry("a:1"),), (TorchSource("t", TorchBuild.CPU),))
CATALOG = Catalog(1, ("two",), tuple(replace(ONE, name=name) for name in ("three", "two", "one")))


@pytest.mark.parametrize(
    ("unit", "n_bytes"),
    [
        ("B", 1),
        ("kB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("KiB", 1_024),
        ("MiB", 1_048_576),
        ("GiB", 1_073_741_824),
        ("TiB", 1_099_511_627_776),
    ],
)
def test_no_unit_of_size_represents_another_number_of_bytes(unit: str, n_bytes: int) -> None:
    assert [parse_size(text) for text in (f"1 {unit}", f" 12.5{unit} ")] == [n_bytes, int(12.5 * n_bytes)]
    with pytest.raises(ConfigError, match=repr(f"{unit} 1")):
        parse_size(f"{unit} 1")


def test_variants_come_in_the_order_of_the_file_and_once() -> None:
    assert [one.name for one in CATALOG.select(("one", "three", "one"))] == ["three", "one"]
    assert [one.name for one in CATALOG.select(())] == ["two"]


def test_a_variant_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no variant 'four'") as caught:
        CATALOG.select(("one", "four"))
    assert caught.value.hint.endswith("three, two, one")


def test_a_variant_asks_for_nothing_that_it_does_not_say() -> None:
    assert (ONE.wheels, ONE.system_packages, ONE.gpu_targets, ONE.prune, ONE.labels) == (
        (),
        (),
        (),
        False,
        (),
    )
    assert ONE.budget == Budget(unpacked_bytes=None, stored_bytes=None)
    [source] = ONE.torch
    assert (source.require, source.index, source.fallback, source.python, source.base) == (
        (),
        None,
        False,
        None,
        (),
    )
    assert ONE.ref == "weir/one:latest"


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("cpu", True),
        ("rocm-6", True),
        ("0", True),
        ("", False),
        ("-cpu", False),
        ("CPU", False),
        ("a_b", False),
    ],
)
def test_a_name_that_no_image_can_have_is_distinguished(text: str, is_name: bool) -> None:
    variants = json.loads((IMAGES / "variants.schema.json").read_text())["properties"]["variants"]
    assert bool(re.search(variants["propertyNames"]["pattern"], text)) is is_name


@pytest.mark.parametrize(
    ("filename", "distribution", "version"),
    [
        ("torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "torch", "2.13.0+cpu"),
        ("Ruamel.yaml__clib-0.2.8-cp311-cp311-linux_x86_64.whl", "ruamel-yaml-clib", "0.2.8"),
    ],
)
def test_a_distribution_is_known_by_its_normalised_name(
    filename: str, distribution: str, version: str
) -> None:
    wheel = Wheel(filename, "ab" * 32, 1)
    assert (wheel.distribution, wheel.version) == (distribution, version)


def test_torch_of_the_base_has_no_version_of_a_wheel() -> None:
    names = ("torchvision-0.20-py3-none-any.whl", "torch-2.13.0-py3-none-any.whl")
    found = Resolved("one", "", "t", TorchBuild.CPU, "3.11", PinnedBase("registry", "a:1", "sha256:0"))
    assert found.torch_version is None
    wheels = tuple(Wheel(name, "ab" * 32, 1) for name in names)
    assert replace(found, wheels=wheels).torch_version == "2.13.0"
    assert replace(found, wheels=wheels[:1]).torch_version is None

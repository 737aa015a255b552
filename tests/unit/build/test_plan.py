"""The bake plan is decided without an engine: same inputs, same bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool.build import catalog, plan
from buildtool.core.model import (
    Bootstrap,
    Budget,
    PinnedBase,
    Registry,
    Resolved,
    TorchBuild,
    TorchSource,
    Variant,
    Wheel,
)
from buildtool.engine.buildx import render_plan
from buildtool.image.documents import Platform

DIGEST = "sha256:" + "a" * 64


def wheel(name: str, stored_bytes: int = 1000) -> Wheel:
    return Wheel(f"{name}-1.0-py3-none-any.whl", "0" * 64, stored_bytes)


def resolved(*wheels: Wheel, origin: str = "bootstrap") -> Resolved:
    base = PinnedBase(origin, "python:3.11-slim" if origin == "registry" else "bookworm", DIGEST)
    return Resolved("cpu", "", "host-pip", TorchBuild.CPU, "3.11", base, tuple(wheels), ("x on 10.0.0.1",))


@pytest.fixture
def cpu() -> Variant:
    return catalog.load().select(("cpu",))[0]


def test_torch_and_heavy_wheels_get_layers_of_their_own() -> None:
    groups = plan.group_wheels([wheel("torch", 190_000_000), wheel("triton", 200_000_000), wheel("idna")])
    assert [w.distribution for w in groups.torch] == ["torch"]
    assert [w.distribution for w in groups.heavy] == ["triton"]
    assert [w.distribution for w in groups.small] == ["idna"]


def test_layers_without_wheels_are_left_out_but_for_that_of_the_user() -> None:
    layers = plan.wheel_layers([wheel("idna"), wheel("big", 10**9)])
    assert [(name, [w.distribution for w in wheels]) for name, wheels in layers] == [
        ("heavy", ["big"]), ("packages", ["idna"]),
    ]  # fmt: skip
    assert plan.wheel_layers([]) == [("packages", ())]


def test_a_registry_base_is_named_by_digest(cpu: Variant) -> None:
    args = plan.build_args(cpu, resolved(origin="registry"), 7)
    assert args["BASE"] == f"python:3.11-slim@{DIGEST}"
    assert plan.build_args(cpu, resolved(), 7)["BASE"] == "rootfs"


def test_system_packages_are_installed_on_a_registry_base_only(cpu: Variant) -> None:
    wanted = replace(cpu, system_packages=("jq",))
    on_registry = plan.build_args(wanted, resolved(wheel("torch"), origin="registry"), 7)
    assert on_registry["SYSTEM_PACKAGES"] == "jq"
    assert "SYSTEM_PACKAGES" not in plan.build_args(wanted, resolved(), 7)


def test_labels_say_the_sources_and_keep_the_hosts_network_out(cpu: Variant) -> None:
    labels = plan.labels(cpu, resolved(wheel("torch")))
    assert labels["io.weir.source.base"] == "bootstrap:bookworm"
    assert labels["io.weir.source.torch"] == "host-pip"
    assert labels["io.weir.torch.build"] == "cpu"
    assert "10.0.0.1" not in json.dumps(labels)


def test_a_plan_has_the_layers_from_the_bottom_up(cpu: Variant) -> None:
    target = plan.ImagePlan(cpu, resolved(wheel("torch"), wheel("idna")), Path("c"))
    image = plan.BuildPlan((target,), 7).as_json()["images"]["cpu"]
    assert [layer["layer"] for layer in image["layers"]] == [
        "base",
        "torch",
        "packages",
        "bytecode",
        "service",
    ]
    assert image["layers"][1]["wheels"] == {"torch-1.0-py3-none-any.whl": "sha256:" + "0" * 64}
    assert "bake" not in plan.BuildPlan((target,), 7).as_json()


BASE = {
    "architecture": "s390x", "variant": "v8", "created": "2001-01-01T00:00:00Z", "history": [{}],
    "config": {
        "Env": ["PATH=/bin", "HOME=/root", "LANG=C"], "User": "root", "Entrypoint": ["/init"], "Cmd": ["sh"],
        "ExposedPorts": {"1/tcp": {}}, "Labels": {"theirs": "x", "io.weir.variant": "x"},
        "WorkingDir": "/srv",
    },
}  # fmt: skip


def test_an_image_keeps_what_its_base_says_of_running_it_unless_the_service_needs_another_value() -> None:
    target = plan.ImagePlan(ASKED, FOUND, Path("c"))
    config = plan.config_of(target, 1767225600, Platform("linux", "arm64"), BASE)
    run = config.pop("config")
    assert config == {
        "architecture": "arm64", "os": "linux", "variant": "v8", "created": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    assert run["Env"] == [
        "PATH=/bin", "LANG=C", "PYTHONPATH=/opt/weir/lib:/opt/weir/app", "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1", "HOME=/tmp",
    ]  # fmt: skip
    assert run["Labels"] == {"theirs": "x", **LABELS}
    assert run["ExposedPorts"] == {"1/tcp": {}, "8000/tcp": {}}
    assert (run["User"], run["Entrypoint"], run["Cmd"], run["WorkingDir"]) == (
        "10001:10001", ["/init"], ["python3", "-m", "service"], "/srv",
    )  # fmt: skip
    assert run["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "service.health"]


def test_an_image_on_a_root_file_system_has_a_path_and_a_step_for_each_layer() -> None:
    target = plan.ImagePlan(ASKED, FOUND, Path("c"))
    run = plan.config_of(target, 0, Platform("linux", "amd64"), {})["config"]
    assert run["Env"][0] == "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    steps = plan.history_of(target, 0, ())
    assert [step["created_by"] for step in steps] == [
        "weir build: root file system of Debian bookworm",
        "weir build: torch 2.9.1+rocm6.4",
        "weir build: no wheels and the user of the service",
        "weir build: bytecode of what the service imports",
        "weir build: the service",
    ]


def test_an_unresolved_variant_can_still_be_planned(cpu: Variant) -> None:
    args = plan.build_args(cpu, plan.unresolved(cpu), 7)
    assert args["BASE"].endswith("@sha256:not-resolved-yet")


def test_the_disk_check_asks_for_more_where_rocm_may_be_bootstrapped() -> None:
    loaded = catalog.load()
    need = {v.name: plan.disk_needed(v, None) for v in loaded.variants}
    assert need["rocm"] > need["cpu"] >= 700_000_000


def test_no_text_of_a_plan_is_a_template_of_bake(cpu: Variant) -> None:
    foreign = replace(cpu, labels=(("k${A}", "v${FOO:-x} %{ if true }"),), dockerfile=Path("x/Dockerfile"))
    target = plan.ImagePlan(foreign, resolved(), Path("c ${HOME}'\""))
    rendered = json.loads(render_plan(plan.BuildPlan((target,), 7).bake()))["target"]["cpu"]
    assert rendered["labels"]["k$${A}"] == "v$${FOO:-x} %%{ if true }"
    assert rendered["context"] == "c $${HOME}'\""


@pytest.mark.parametrize(("n_bytes", "heavy"), [(19_999_999, False), (20_000_000, True), (20_000_001, True)])
def test_a_wheel_of_20_mb_gets_a_layer_apart_from_small_ones(n_bytes: int, heavy: bool) -> None:
    big = wheel("triton", n_bytes)
    assert plan.group_wheels([big]) == plan.Groups((), *(((big,), ()) if heavy else ((), (big,))))


def test_a_dockerfile_gets_exactly_these_arguments(cpu: Variant) -> None:
    wanted = replace(cpu, system_packages=("jq", "tini"))
    found = replace(resolved(wheel("torch"), origin="registry"), base=PinnedBase("registry", "a:1@x", DIGEST))
    assert plan.build_args(wanted, found, 7) == {
        "SOURCE_DATE_EPOCH": "7",
        "BASE": f"a:1@{DIGEST}",
        "SYSTEM_PACKAGES": "jq tini",
    }


ASKED = Variant(
    "tiny", "A summary", "3.11", (Bootstrap("bookworm", ()),),
    (TorchSource("host-pip", TorchBuild.ROCM),), gpu_targets=("gfx906", "gfx1100"), prune=True,
    labels=(("org.example", "mine"),),
)  # fmt: skip
FOUND = Resolved(
    "tiny", "", "host-pip", TorchBuild.ROCM, "3.11", PinnedBase("bootstrap", "bookworm", DIGEST),
    (Wheel("torch-2.9.1+rocm6.4-cp311-cp311-linux_x86_64.whl", "0" * 64, 1),),
)  # fmt: skip
LABELS = {
    "org.opencontainers.image.title": "weir/tiny",
    "org.opencontainers.image.description": "A summary",
    "org.opencontainers.image.base.name": "bookworm",
    "org.opencontainers.image.base.digest": DIGEST,
    "io.weir.variant": "tiny",
    "io.weir.torch.build": "rocm",
    "io.weir.torch.version": "2.9.1+rocm6.4",
    "io.weir.gpu-targets": "gfx906,gfx1100",
    "io.weir.pruned": "yes",
    "io.weir.source.base": "bootstrap:bookworm",
    "io.weir.source.torch": "host-pip",
    "io.weir.source.wheels": "host-pip",
    "org.example": "mine",
}


def test_every_label_of_an_image_says_what_is_in_it() -> None:
    assert plan.labels(ASKED, FOUND) == LABELS
    bare = plan.labels(replace(ASKED, prune=False, gpu_targets=(), labels=()), replace(FOUND, wheels=()))
    assert {key: value for key, value in bare.items() if LABELS[key] != value} == {
        "io.weir.torch.version": "from the base",
        "io.weir.gpu-targets": "",
        "io.weir.pruned": "no",
        "io.weir.source.wheels": "none",
    }
    assert bare.keys() == LABELS.keys() - {"org.example"}


def test_bake_is_asked_for_images_with_a_dockerfile_and_nothing_else() -> None:
    naive = replace(ASKED, name="plain", dockerfile=Path("images/naive/Dockerfile"))
    images = (plan.ImagePlan(ASKED, FOUND, Path("one")), plan.ImagePlan(naive, FOUND, Path("two")))
    asked = plan.BuildPlan(images, 7).bake()
    assert asked["group"] == {"default": {"targets": ["plain"]}}
    assert asked.keys() == {"group", "target"}
    assert asked["target"] == {
        "plain": {
            "context": "two",
            "dockerfile": "images/naive/Dockerfile",
            "args": plan.build_args(naive, FOUND, 7),
            "labels": plan.labels(naive, FOUND),
            "tags": ["weir/plain:latest"],
            "attest": ["type=provenance,disabled=true"],
        }
    }
    assert plan.BuildPlan(images, 7).bake("t:1")["target"]["plain"]["tags"] == ["t:1-plain"]
    assert plan.BuildPlan(images, 7).as_json().keys() == {"images", "bake"}


def test_an_unresolved_variant_names_its_first_source_and_base() -> None:
    source = TorchSource("index", TorchBuild.CUDA, python="3.12", base=(Registry("a:1"), Registry("b:1")))
    other = TorchSource("host-pip", TorchBuild.CPU)
    wanted = replace(ASKED, torch=(source, other), base=(Bootstrap("bookworm", ()), Registry("c:1")))
    found = plan.unresolved(wanted)
    assert found == Resolved(
        "tiny", "", "index", TorchBuild.CUDA, "3.12",
        PinnedBase("registry", "a:1", "sha256:not-resolved-yet"), (), found.notes,
    )  # fmt: skip
    assert len(found.notes) == 1
    assert plan.unresolved(replace(wanted, torch=(other, source))) == Resolved(
        "tiny", "", "host-pip", TorchBuild.CPU, "3.11",
        PinnedBase("bootstrap", "bookworm", "not-resolved-yet"), (), found.notes,
    )  # fmt: skip


def test_a_plan_is_json_in_one_order_with_numbers_as_they_are() -> None:
    assert render_plan({"b": [1, True, None], "a": {"${x}": "%{y}"}}) == (
        '{\n  "a": {\n    "$${x}": "%%{y}"\n  },\n  "b": [\n    1,\n    true,\n    null\n  ]\n}'
    )


@pytest.mark.parametrize(
    ("unpacked", "found", "packages", "n_bytes"),
    [
        (None, None, ("tini",), 0),
        (500, None, ("tini",), 500),
        (500, FOUND, ("tini",), 501),
        (None, replace(FOUND, wheels=(wheel("a", 1000), wheel("b", 10))), ("tini",), 5 * 1010),
        (None, None, ("tini", "python3-torch"), 6_000_000_000),
        (7_000_000_000, None, ("python3-torch",), 7_000_000_000),
    ],
)
def test_the_disk_check_adds_up_image_and_wheels(
    unpacked: int | None, found: Resolved | None, packages: tuple[str, ...], n_bytes: int
) -> None:
    bases = (Registry("python3-torch:1"), Bootstrap("bookworm", packages))
    wanted = replace(ASKED, base=bases, budget=Budget(unpacked_bytes=unpacked))
    assert plan.disk_needed(wanted, found) == n_bytes


def test_no_build_is_begun_with_less_than_two_gigabytes() -> None:
    assert plan.DISK_FLOOR == 2_000_000_000

"""The bake plan is decided without an engine: same inputs, same bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool import catalog, plan
from buildtool.model import PinnedBase, Resolved, TorchBuild, Variant, Wheel

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


def test_stages_without_wheels_are_passed_over(cpu: Variant) -> None:
    args = plan.build_args(cpu, resolved(wheel("torch"), wheel("idna")), 7)
    assert (args["TORCH_FROM"], args["HEAVY_FROM"], args["SMALL_FROM"]) == ("base", "torch", "torch")
    args = plan.build_args(cpu, resolved(wheel("idna"), wheel("big", 10**9)), 7)
    assert (args["HEAVY_FROM"], args["SMALL_FROM"]) == ("base", "heavy")


def test_a_registry_base_is_named_by_digest(cpu: Variant) -> None:
    args = plan.build_args(cpu, resolved(origin="registry"), 7)
    assert args["BASE"] == f"python:3.11-slim@{DIGEST}"
    assert plan.build_args(cpu, resolved(), 7)["BASE"] == "rootfs"


def test_system_packages_are_installed_on_a_registry_base_only(cpu: Variant) -> None:
    wanted = replace(cpu, system_packages=("jq",))
    on_registry = plan.build_args(wanted, resolved(wheel("torch"), origin="registry"), 7)
    assert on_registry["SYSTEM_PACKAGES"] == "jq"
    assert on_registry["TORCH_FROM"] == "packages"
    assert "SYSTEM_PACKAGES" not in plan.build_args(wanted, resolved(), 7)


def test_labels_say_the_sources_and_keep_the_hosts_network_out(cpu: Variant) -> None:
    labels = plan.labels(cpu, resolved(wheel("torch")))
    assert labels["io.weir.source.base"] == "bootstrap:bookworm"
    assert labels["io.weir.source.torch"] == "host-pip"
    assert labels["io.weir.torch.build"] == "cpu"
    assert "10.0.0.1" not in json.dumps(labels)


def test_the_same_targets_give_the_same_bytes(cpu: Variant) -> None:
    target = plan.Target(cpu, resolved(wheel("torch")), Path("c"))
    first = plan.render_plan(plan.plan_bake([target], epoch=7, zstd=True))
    assert first == plan.render_plan(plan.plan_bake([target], epoch=7, zstd=True))
    image = json.loads(first)["target"]["cpu"]
    assert image["attest"] == ["type=provenance,disabled=true"]
    assert "compression=zstd" in image["output"][0]
    assert image["args"]["SOURCE_DATE_EPOCH"] == "7"


def test_the_classic_store_gets_the_default_exporter(cpu: Variant) -> None:
    target = plan.Target(cpu, resolved(), Path("c"))
    assert "output" not in plan.plan_bake([target], epoch=7, zstd=False)["target"]["cpu"]


def test_an_unresolved_variant_can_still_be_planned(cpu: Variant) -> None:
    args = plan.build_args(cpu, plan.unresolved(cpu), 7)
    assert args["BASE"].endswith("@sha256:not-resolved-yet")


def test_the_disk_check_asks_for_more_where_rocm_may_be_bootstrapped() -> None:
    loaded = catalog.load()
    need = {v.name: plan.disk_needed(v, None) for v in loaded.variants}
    assert need["rocm"] > need["cpu"] >= 10**9


def test_no_text_of_a_plan_is_a_template_of_bake(cpu: Variant) -> None:
    target = plan.Target(
        replace(cpu, labels=(("k${A}", "v${FOO:-x} %{ if true }"),)), resolved(), Path("c ${HOME}'\"")
    )
    rendered = json.loads(plan.render_plan(plan.plan_bake([target], epoch=7, zstd=True)))["target"]["cpu"]
    assert rendered["labels"]["k$${A}"] == "v$${FOO:-x} %%{ if true }"
    assert rendered["context"] == "c $${HOME}'\""

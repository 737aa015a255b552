"""Constructed hosts, each with the verdict that the doctor must reach; the user's documents among them."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
from host_trees import ANN, ENGINE, STRANGER, Card, Case, facts_of, host_of, python

from buildtool.build.catalog import load
from buildtool.cli.doctor import display_named
from buildtool.core.errors import ConfigError
from buildtool.core.model import Bootstrap
from buildtool.doctor.advice import advise, for_card, supposed_host
from buildtool.doctor.compatibility import compatibility
from buildtool.doctor.fix import variant_text
from buildtool.doctor.gather import gather
from buildtool.doctor.host import EngineFacts, Host, Node, OwnImage
from buildtool.doctor.routes import OWN_VARIANT, SHIPPED
from buildtool.doctor.text import answer_text
from probes.core.codec import decode, encode
from probes.core.unknown import Unknown

TODAY = datetime.date(2026, 11, 21)
MI50, MI100, MI210 = Card("1002:66a1", 90006, 32), Card("1002:738c", 90008, 32), Card("1002:740f", 90010, 64)
MI300A = Card("1002:74a0", 90402, 128, code="0x120000")
W7900, W7800 = Card("1002:7448", 110000, 48), Card("1002:745e", 110000, 32)
WX4100 = Card("1002:67e3", 80003, 4, lanes=8)
RX6700, RX7900, RX9070 = Card("1002:73df", 100301), Card("1002:744c", 110000, 24), Card("1002:7550", 120001)


def nvidia(product: str) -> Card:
    return Card(f"10de:{product}", driver="nvidia")


def cuda(target: str) -> str:
    """The command that builds the variant `cuda` for a card."""
    return f"weir build cuda --targets {target}"


def rocm(target: str) -> str:
    return f"weir build rocm --targets {target}"


FIX = OWN_VARIANT
KFD_OF_VIDEO = (
    Node("/dev/kfd", 0, 993, "render", "0660"),
    Node("/dev/dri/renderD128", 0, 993, "render", "0660"),
)

CASES = [
    # document 001: a cluster of MI50s beside an L40
    Case(
        "eight-mi50",
        (MI50,) * 8,
        "gfx906",
        "official",
        "2.7.0+rocm6.3",
        OWN_VARIANT,
        says=("MI50", "rocm6.3", "6.3 is the last"),
    ),
    Case(
        "mi50-with-the-conda-env-of-rocm5.7",
        (MI50,),
        "gfx906",
        "official",
        "2.7.0+rocm6.3",
        OWN_VARIANT,
        pythons=(python("3.10", "2.2.2+rocm5.7", hip="5.7.31921"),),
        silent=("no matrix kernels",),
    ),
    Case(
        "mi50-with-the-image-of-rocm6.2.3",
        (MI50,),
        "gfx906",
        "official",
        "2.7.0+rocm6.3",
        OWN_VARIANT,
        pythons=(python("3.10", "2.3.0", hip="6.2.41134"),),
        silent=("no matrix kernels",),
    ),
    Case(
        "mi50-with-rocm6.4",
        (MI50,),
        "gfx906",
        "official",
        "2.7.0+rocm6.3",
        OWN_VARIANT,
        pythons=(python("3.12", "2.9.1+rocm6.4", hip="6.4.43484"),),
        says=("no matrix kernels for gfx906",),
    ),
    Case(
        "l40",
        (nvidia("26b5"),),
        "sm_89",
        "official",
        "2.14.0+cu130",
        cuda("sm_89"),
        nvidia_driver="580.95.05",
    ),
    # document 003: fine-tuning on MI50, MI100, MI200; Pythons; a cloud with A100s
    Case(
        "mi50-16gb",
        (replace(MI50, vram_gib=16),),
        "gfx906",
        "official",
        "2.7.0+rocm6.3",
        OWN_VARIANT,
        says=("16.00 GiB",),
    ),
    Case("mi100", (MI100,), "gfx908", "official", "2.13.0+rocm7.2", OWN_VARIANT),
    Case("mi210", (MI210,), "gfx90a", "official", "2.13.0+rocm7.2", rocm("gfx90a")),
    Case("mi250x", (Card("1002:7408", 90010, 64),), "gfx90a", "official", "2.13.0+rocm7.2", rocm("gfx90a")),
    Case(
        "python-3.13-has-wheels-now",
        (MI210,),
        "gfx90a",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx90a"),
        pythons=(python("3.13"),),
        says=("3.10-3.15",),
    ),
    Case(
        "python-3.9-is-too-old-for-them",
        (MI210,),
        "gfx90a",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx90a"),
        pythons=(python("3.9"),),
    ),
    Case(
        "cuda-torch-beside-an-mi210",
        (MI210,),
        "gfx90a",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx90a"),
        pythons=(python("3.11", "2.9.1+cu128", cuda="12.8"),),
        says=("is a CUDA 12.8 build: it can't use gfx90a",),
    ),
    Case(
        "a100-in-a-cloud",
        (nvidia("20b2"),),
        "sm_80",
        "official",
        "2.14.0+cu130",
        cuda("sm_80"),
        nvidia_driver="580.65.06",
    ),
    # document 004: "Radeon Pro or Instinct", video group only, MI300A, W7900, W7800
    Case("four-mi300a", (MI300A,) * 4, "gfx942", "official", "2.13.0+rocm7.2", rocm("gfx942")),
    Case("two-w7900", (W7900,) * 2, "gfx1100", "official", "2.13.0+rocm7.2", rocm("gfx1100")),
    Case("w7800", (W7800,), "gfx1100", "official", "2.13.0+rocm7.2", rocm("gfx1100")),
    Case(
        "w7800-in-the-video-group-only",
        (W7800,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        user=replace(ANN, groups=(44, 1000)),
        nodes=KFD_OF_VIDEO,
        says=("sudo usermod -aG render ann", "--group-add 993"),
    ),
    Case(
        "a-radeon-pro-that-is-not-supported",
        (WX4100,),
        "gfx803",
        "distribution",
        "2.6.0 (CPU build)",
        rocm("gfx803"),
        says=("Debian 13", "ROCR 7 rejects".replace("ROCR", "ROCr")),
    ),
    # the user's card in its places
    Case("wx4100-under-wsl", (), None, wsl=True, says=("not which AMD card it is",)),
    Case(
        "wx4100-without-a-driver",
        (replace(WX4100, version=0, driver=""),),
        "gfx803",
        "community",
        "unknown",
        kfd=False,
        says=("Vulkan",),
    ),
    Case(
        "wx4100-handed-to-a-guest",
        (replace(WX4100, version=0, driver="vfio-pci"),),
        "gfx803",
        "community",
        "unknown",
        kfd=False,
    ),
    Case(
        "wx4100-with-a-useless-override",
        (WX4100,),
        "gfx803",
        "distribution",
        "2.6.0",
        "unset HSA_OVERRIDE_GFX_VERSION",
        env={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
        says=("not a route that is known to work",),
    ),
    # one of every family
    Case(
        "vega64",
        (Card("1002:687f", 90000, 8),),
        "gfx900",
        "community",
        "2.7.0+rocm6.3",
        OWN_VARIANT,
        says=("a matrix product aborts",),
    ),
    Case("mi25", (Card("1002:6860", 90000, 16),), "gfx900", "community", "2.7.0+rocm6.3", OWN_VARIANT),
    Case("radeon-vii", (Card("1002:66af", 90006, 16),), "gfx906", "official", "2.7.0+rocm6.3", OWN_VARIANT),
    Case(
        "mi300x",
        (Card("1002:74a1", 90402, 192, code="0x120000"),),
        "gfx942",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx942"),
    ),
    Case(
        "mi350x",
        (Card("1002:75a0", 90500, 288, code="0x120000"),),
        "gfx950",
        "official",
        "2.13.0+rocm7.2",
        OWN_VARIANT,
    ),
    Case(
        "rx5700",
        (Card("1002:731f", 100100, 8),),
        "gfx1010",
        "distribution",
        "python-pytorch-rocm",
        OWN_VARIANT,
        says=("and crashed",),
    ),
    Case("rx6800", (Card("1002:73bf", 100300),), "gfx1030", "official", "2.13.0+rocm7.2", rocm("gfx1030")),
    Case(
        "rx6700",
        (RX6700,),
        "gfx1031",
        "official",
        "torch[device-gfx1031]",
        OWN_VARIANT,
        says=("10.3.0", "compute wrong results"),
    ),
    Case(
        "rx6600-with-the-known-override",
        (Card("1002:73ff", 100302, 8),),
        "gfx1032",
        "official",
        "torch[device-gfx1032]",
        OWN_VARIANT,
        env={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
        says=("a known route, which risks wrong results",),
    ),
    Case(
        "rx6500xt",
        (Card("1002:743f", 100304, 4),),
        "gfx1034",
        "official",
        "torch[device-gfx1034]",
        OWN_VARIANT,
    ),
    Case("rx7900", (RX7900,), "gfx1100", "official", "2.13.0+rocm7.2", rocm("gfx1100")),
    Case("rx7800xt", (Card("1002:747e", 110001),), "gfx1101", "official", "2.13.0+rocm7.2", rocm("gfx1101")),
    Case("rx7600", (Card("1002:7480", 110002, 8),), "gfx1102", "official", "2.13.0+rocm7.2", rocm("gfx1102")),
    Case(
        "radeon-780m",
        (Card("1002:15bf", 110003, 4),),
        "gfx1103",
        "official",
        "torch[device-gfx1103]",
        OWN_VARIANT,
    ),
    Case(
        "strix-point",
        (Card("1002:150e", 110500, 4),),
        "gfx1150",
        "official",
        "2.13.0+rocm7.2",
        OWN_VARIANT,
    ),
    Case(
        "strix-halo",
        (Card("1002:1586", 110501, 96),),
        "gfx1151",
        "official",
        "2.13.0+rocm7.2",
        OWN_VARIANT,
    ),
    Case("rx9060", (Card("1002:7590", 120000),), "gfx1200", "official", "2.13.0+rocm7.2", rocm("gfx1200")),
    Case("rx9070", (RX9070,), "gfx1201", "official", "2.13.0+rocm7.2", rocm("gfx1201")),
    Case(
        "gtx750ti",
        (nvidia("1380"),),
        "sm_50",
        "official",
        "2.14.0+cu126",
        FIX,
        nvidia_driver="570.195.03",
        says=("no kernel image is available",),
    ),
    Case("gtx970", (nvidia("13c2"),), "sm_52", "official", "2.14.0+cu126", FIX, nvidia_driver="570.195.03"),
    Case("p100", (nvidia("15f8"),), "sm_60", "official", "2.14.0+cu126", FIX, nvidia_driver="570.195.03"),
    Case(
        "gtx1080ti-with-a-cuda-13-torch",
        (nvidia("1b06"),),
        "sm_61",
        "official",
        "2.14.0+cu126",
        FIX,
        nvidia_driver="580.95.05",
        pythons=(python("3.12", "2.14.0", cuda="13.0"),),
        says=("CUDA 13 builds have no kernels for sm_61",),
    ),
    Case("v100", (nvidia("1db4"),), "sm_70", "official", "2.14.0+cu126", FIX, nvidia_driver="580.95.05"),
    Case(
        "t4-with-an-older-driver",
        (nvidia("1eb8"),),
        "sm_75",
        "official",
        "2.14.0+cu126",
        FIX,
        nvidia_driver="550.163.01",
        says=("driver 580 or later; this host has nvidia 550.163.01",),
    ),
    Case(
        "rtx3090",
        (nvidia("2204"),),
        "sm_86",
        "official",
        "2.14.0+cu130",
        cuda("sm_86"),
        nvidia_driver="580.95.05",
    ),
    Case(
        "h100",
        (nvidia("2330"),),
        "sm_90",
        "official",
        "2.14.0+cu130",
        cuda("sm_90"),
        nvidia_driver="580.95.05",
    ),
    Case(
        "h200-whose-driver-is-535",
        (nvidia("2335"),),
        "sm_90",
        "official",
        "2.14.0+cu126",
        FIX,
        nvidia_driver="535.274.02",
    ),
    Case(
        "b200-whose-driver-is-570",
        (nvidia("2901"),),
        "sm_100",
        "official",
        "2.11.0+cu128",
        FIX,
        nvidia_driver="570.195.03",
    ),
    Case(
        "rtx5090",
        (nvidia("2b85"),),
        "sm_120",
        "official",
        "2.14.0+cu130",
        cuda("sm_120"),
        nvidia_driver="580.95.05",
    ),
    Case(
        "nvidia-without-its-driver",
        (replace(nvidia("2684"), driver="nouveau"),),
        "sm_89",
        "official",
        "2.14.0+cu130",
        says=("NVIDIA's kernel driver isn't loaded",),
    ),
    # hosts that lack something
    Case("no-card-at-all", (), None, says=("no AMD or NVIDIA card",)),
    Case(
        "an-amd-card-inside-a-container-without-kfd",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        kfd=False,
        says=("/dev/kfd isn't here",),
    ),
    Case(
        "no-engine",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        "sudo systemctl start docker",
        user=ANN,
        engine=Unknown("no Docker engine answers"),
    ),
    Case(
        "no-buildx",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        "weir engine",
        engine=replace(ENGINE, buildx=Unknown("the plugin isn't installed")),
    ),
    Case(
        "an-old-compose",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        engine=replace(ENGINE, compose="2.17.3"),
        says=("older than 2.20",),
    ),
    Case(
        "rootless-with-amds-runtime",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        engine=replace(ENGINE, rootless=True, runtimes=("amd", "runc")),
        says=("doesn't support a rootless engine",),
    ),
    Case(
        "gpus-all-needs-28.3",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        engine=replace(ENGINE, version="27.5.1", runtimes=("amd", "runc")),
        says=("`--gpus all` doesn't reach",),
    ),
    Case(
        "gpus-all-works-through-amds-runtime",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        engine=replace(ENGINE, runtimes=("amd", "runc")),
        silent=("--gpus all",),
    ),
    Case(
        "gpus-all-works-through-cdi",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        engine=replace(ENGINE, version="29.3.0"),
        files={"etc/cdi/amd.json": '{"cdiVersion": "0.6.0", "kind": "amd.com/gpu"}'},
        silent=("--gpus all",),
        says=("amd.com/gpu",),
    ),
    Case(
        "a-stranger-to-the-groups",
        (RX7900,),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        user=STRANGER,
        nodes=KFD_OF_VIDEO,
        says=("can't be opened by bob",),
    ),
    Case("wsl-with-nvidia", (), None, wsl=True, silent=("no AMD or NVIDIA card",)),
    Case("a-card-that-nobody-listed", (Card("1002:9999"),), None, says=("1002:9999 is not in our list",)),
    Case(
        "a-virtual-machine",
        (RX9070,),
        "gfx1201",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1201"),
        files={"sys/class/dmi/id/sys_vendor": "QEMU", "sys/class/dmi/id/product_name": "Standard PC"},
        says=("virtual machine (QEMU Standard PC)",),
    ),
    Case(
        "two-makers",
        (RX7900, nvidia("2684")),
        "gfx1100",
        "official",
        "2.13.0+rocm7.2",
        rocm("gfx1100"),
        nvidia_driver="580.95.05",
        says=("GeForce RTX 4090",),
    ),
    Case(
        "an-override-that-is-no-version",
        (RX6700,),
        "gfx1031",
        "official",
        "torch[device-gfx1031]",
        "unset HSA_OVERRIDE_GFX_VERSION",
        env={"HSA_OVERRIDE_GFX_VERSION": "gfx1030"},
    ),
]


def test_there_are_at_least_forty_hosts() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_host_gets_the_right_verdict(case: Case, tmp_path: Path) -> None:
    host = host_of(case, tmp_path)
    advice = advise(host, compatibility(), TODAY)
    text = answer_text(host, advice, [])
    if case.target:
        first = advice.cards[0]
        assert (first.target, first.best.rank if first.best else "none") == (case.target, case.rank)
        assert first.best is not None
        assert first.best.torch.startswith(case.torch), first.best.torch
    else:
        assert all(isinstance(card.target, Unknown) for card in advice.cards)
    assert text.splitlines()[-1].strip() == advice.next_step == case.next_step
    assert [words for words in case.says if words not in text] == []
    assert [words for words in case.silent if words in text] == []


@pytest.mark.parametrize(
    ("name", "fits"), [("python-3.13-has-wheels-now", True), ("python-3.9-is-too-old-for-them", False)]
)
def test_pythons_are_matched_with_the_wheels(name: str, fits: bool, tmp_path: Path) -> None:
    host = host_of(next(case for case in CASES if case.name == name), tmp_path)
    best = advise(host, compatibility(), TODAY).cards[0].best
    assert best is not None
    assert bool(best.pythons_here) is fits


def test_the_shipped_variants_are_the_ones_that_the_next_step_counts_on() -> None:
    for name, of_variant in SHIPPED.items():
        (variant,) = load().select((of_variant,))
        build = compatibility().build(name)
        assert build is not None
        assert variant.prune
        if of_variant == "rocm":
            assert variant.torch[0].require[0] == build.requirement("gfx1100")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mi50-16gb", "rx6700", "h100", "rx7900"])
def test_a_variant_for_this_host_is_a_catalog_that_build_accepts(name: str, tmp_path: Path) -> None:
    host = host_of(next(case for case in CASES if case.name == name), tmp_path / "host")
    advice = advise(host, compatibility(), TODAY)
    file = tmp_path / "here.yaml"
    file.write_text(variant_text(advice, load()))
    (variant,) = load(file).select(("here",))
    best = advice.cards[0].best
    assert best is not None
    assert best.torch.partition(" ")[0].removeprefix("torch") in variant.torch[0].require[0]
    assert variant.gpu_targets == best.targets
    assert variant.prune is bool(best.targets)
    (shipped,) = load().select(("rocm",))
    assert variant.base == shipped.base
    assert any(isinstance(base, Bootstrap) for base in variant.base), "no way where no registry answers"


def recorded() -> Host:
    """The machine with an H200, as `weir doctor --json` saw it on 2026-11-21."""
    file = Path(__file__).parent / "recorded" / "h200.json"
    return decode(Host, json.loads(file.read_text(encoding="utf-8")))


def test_the_recorded_h200_gets_the_right_verdict() -> None:
    host = recorded()
    (card,) = advise(host, compatibility(), TODAY).cards
    assert (host.displays[0].product, card.product, card.target) == ("10de:2335", "NVIDIA H200", "sm_90")
    assert card.best is not None
    assert (card.best.rank, card.best.torch, card.best.needs) == ("official", "2.14.0+cu130", ())
    assert advise(host, compatibility(), TODAY).next_step == "weir engine"
    ready = replace(host, engine=ENGINE)
    assert advise(ready, compatibility(), TODAY).next_step == cuda("sm_90")


CPU_IMAGE, ROCM_IMAGE = (
    OwnImage("weir/cpu:latest", "cpu", ()),
    OwnImage("weir/rocm:latest", "rocm", ("gfx1100",)),
)
CUDA_IMAGE = OwnImage("weir/cuda:latest", "cuda", ("sm_90",))


@pytest.mark.parametrize(
    ("name", "image", "started", "elsewhere"),
    [
        (
            "no-card-at-all",
            CPU_IMAGE,
            "docker compose up",
            "docker run --rm -p 127.0.0.1:8000:8000 weir/cpu:latest",
        ),
        ("rx7900", ROCM_IMAGE, "docker compose up api-rocm", "weir doctor --prove weir/rocm:latest"),
        (
            "h100",
            CUDA_IMAGE,
            "docker compose up api-cuda",
            "weir doctor --prove weir/cuda:latest",
        ),
    ],
)
def test_an_image_that_is_there_is_not_to_be_built_again(
    name: str, image: OwnImage, started: str, elsewhere: str, tmp_path: Path
) -> None:
    host = host_of(next(case for case in CASES if case.name == name), tmp_path)
    assert isinstance(host.engine, EngineFacts)
    ready = replace(host, engine=replace(host.engine, images=(image,)), override="")
    assert advise(replace(ready, composed=True), compatibility(), TODAY).next_step == started
    assert advise(ready, compatibility(), TODAY).next_step == elsewhere
    for other in (replace(image, name="weir/other:latest"), replace(ROCM_IMAGE, targets=("gfx906",))):
        without = replace(host, engine=replace(host.engine, images=(other,)))
        assert "build" in advise(without, compatibility(), TODAY).next_step


def test_an_image_of_this_host_does_not_answer_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    host = host_of(next(case for case in CASES if case.name == "rx7900"), tmp_path)
    assert isinstance(host.engine, EngineFacts)
    here = replace(host, engine=replace(host.engine, images=(ROCM_IMAGE,)))
    asked = supposed_host(here, host.displays[0], "linux")
    assert advise(asked, compatibility(), TODAY).next_step == "weir build rocm --targets gfx1100"


def test_the_engine_s_own_images_are_read_with_their_cards(tmp_path: Path) -> None:
    case = CASES[0]
    labels = {"io.weir.torch.build": "rocm", "io.weir.gpu-targets": "gfx906,gfx1100"}
    facts = replace(facts_of(case), images={"weir/rocm:latest": labels, "weir/odd:1": {}})
    (tmp_path / "compose.yaml").touch()
    found = gather(tmp_path, {}, facts, cwd=tmp_path)
    assert found.composed
    assert isinstance(found.engine, EngineFacts)
    odd = OwnImage("weir/odd:1", "", ())
    assert found.engine.images == (odd, OwnImage("weir/rocm:latest", "rocm", ("gfx906", "gfx1100")))


def test_a_host_without_a_route_has_no_variant(tmp_path: Path) -> None:
    host = host_of(next(case for case in CASES if case.name == "no-card-at-all"), tmp_path)
    with pytest.raises(ConfigError, match="no card of this host"):
        variant_text(advise(host, compatibility(), TODAY), load())


def test_a_card_that_is_not_here_can_be_asked_about(tmp_path: Path) -> None:
    data = compatibility()
    host = supposed_host(host_of(CASES[0], tmp_path), display_named("wx 4100", data), "windows")
    text = answer_text(host, advise(host, data, TODAY), [])
    assert "torch-directml" in text
    assert "Vulkan" in text
    assert "ROCm for Windows doesn't list the card" in text
    assert "can't help" in text
    assert text.splitlines()[-1] == "  weir build cpu"


def test_a_name_of_several_cards_is_refused() -> None:
    with pytest.raises(ConfigError, match="names several cards"):
        display_named("radeon", compatibility())
    with pytest.raises(ConfigError, match="no card of our list"):
        display_named("voodoo", compatibility())


@pytest.mark.parametrize("words", ["wx4100", "WX-4100", "wx 4100", "radeon pro wx4100"])
def test_a_card_is_found_however_its_name_is_spaced(words: str) -> None:
    assert display_named(words, compatibility()).target == "gfx803"


@pytest.mark.parametrize(
    ("words", "meant"), [("wx 4101", "Radeon Pro WX 4100 (gfx803)"), ("MI300Y", "Instinct MI300X (gfx942)")]
)
def test_no_other_cards_target_is_suggested_for_a_card_that_is_not_known(words: str, meant: str) -> None:
    """`--card wx4100` got the advice `--card gfx1100`, which answers for another card."""
    with pytest.raises(ConfigError) as refused:
        display_named(words, compatibility())
    assert "gfx1100" not in refused.value.hint
    assert meant in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        display_named("voodoo", compatibility())
    assert "gfx" not in refused.value.hint
    assert "lspci -nn" in refused.value.hint


def test_the_command_for_a_card_that_is_not_here_names_it(tmp_path: Path) -> None:
    """`weir doctor --variants` looked for the card on this host, and ended in an error."""
    host = supposed_host(host_of(CASES[0], tmp_path), display_named("MI100", compatibility()), "linux")
    advice = for_card(advise(host, compatibility(), TODAY), ["--card", "MI100"])
    commands = [advice.next_step, *(route.command for card in advice.cards for route in card.routes)]
    assert any("weir doctor --card MI100 --variants" in each for each in commands)
    assert not any("weir doctor --variants" in each for each in commands)


def test_facts_and_advice_survive_json(tmp_path: Path) -> None:
    host = host_of(CASES[0], tmp_path)
    assert decode(Host, encode(host)) == host
    encode(advise(host, compatibility(), TODAY))

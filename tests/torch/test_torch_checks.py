"""What the doctor tries on a card, here on the CPU: right results hold, wrong ones and errors fail."""

import pytest
import torch

from probes.core.unknown import Unknown
from probes.hardware import torch_build
from probes.hardware.torch_build import checks, serves
from probes.records.facts import Gpu

NOT_KNOWN = Unknown("not asked")
CARD = Gpu("a card", "sm_89", NOT_KNOWN, 1 << 30, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(torch_build, "DEVICE", "cpu")
    monkeypatch.setattr(torch_build, "_gpu", lambda _: CARD)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90"])


def test_right_results_hold() -> None:
    found = list(checks())
    assert [one.name for one in found] == [
        "kernels for the card",
        "a copy there and back",
        "a matrix product, float32",
        "a matrix product, float16",
        "a convolution",
    ]
    assert [one.name for one in found if not one.holds] == []
    assert found[0].said == "sm_89 in sm_80 sm_86 sm_90"


def test_a_wrong_product_and_a_refusing_library_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype == torch.float16) * 3)

    def refuse(*_: object) -> None:
        raise RuntimeError("rocBLAS error: Cannot read TensileLibrary.dat\nmore")

    monkeypatch.setattr(torch, "conv2d", refuse)
    failed = {one.name: one.said for one in checks() if not one.holds}
    assert set(failed) == {"a matrix product, float16", "a convolution"}
    assert failed["a convolution"] == "rocBLAS error: Cannot read TensileLibrary.dat"


@pytest.mark.parametrize(
    ("code", "target", "holds"),
    [
        ("sm_86", "sm_89", True),
        ("sm_90", "sm_89", False),
        ("sm_50", "sm_61", False),
        ("compute_50", "sm_61", True),
        ("compute_90", "sm_89", False),
        ("gfx906", "gfx906", True),
        ("gfx90a:sramecc+:xnack-", "gfx90a", True),
        ("gfx1030", "gfx1031", False),
        ("sm_90a", "sm_90", False),
    ],
)
def test_code_serves_a_card_as_its_maker_promises(code: str, target: str, holds: bool) -> None:
    assert serves(code, target) is holds

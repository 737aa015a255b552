"""Finds what torch is and which GPUs it can really compute on. The other gate to torch is `device`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from probes.core.errors import OutOfMemory
from probes.core.unknown import Unknown
from probes.hardware.nvml import open_card
from probes.hardware.prune_manifest import foreign_card
from probes.hardware.sysfs import read_link
from probes.records.facts import Api, Check, Gpu, Link, TorchFacts

# the last for more bytes than 64 bits count
_NO_MEMORY = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
LOAD_WORDS, LOAD_COPIES = 2**20, 64  # half a GiB in all: from 10 ms to 100 ms on any link


def describe() -> TorchFacts:
    """The facts of this torch, and the GPUs that it can really compute on (one sum is tried)."""
    api, api_version = _api()
    obstacle = _obstacle(api)
    count = 0 if obstacle else torch.cuda.device_count()
    return TorchFacts(
        version=torch.__version__,
        api=api,
        api_version=api_version,
        threads=torch.get_num_threads(),
        gpus=tuple(_gpu(index) for index in range(count)),
        obstacle=obstacle,
    )


def _api() -> tuple[Api, str]:
    if torch.version.hip:
        return "hip", torch.version.hip
    if torch.version.cuda:
        return "cuda", torch.version.cuda
    return "none", ""


def _obstacle(api: Api) -> str:
    if api == "none":
        return "this torch is a CPU build"
    foreign = foreign_card(Path("/"), os.environ) if api == "hip" else ""
    if foreign:
        return foreign
    try:
        torch.cuda.init()
        total = torch.ones(8, device="cuda").sum().item()
    except (RuntimeError, AssertionError) as error:  # both, for missing parts of a driver or build
        return f"torch can't use a GPU: {first_line(error)}"
    return "" if total == 8 else f"the GPU added eight ones to {total}"


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    target = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
    bus = getattr(properties, "pci_bus_id", None)
    l2 = getattr(properties, "L2_cache_size", None)
    integrated = getattr(properties, "is_integrated", None)
    # asking for free memory opens a context on the card: only the one that is measured is worth it
    opened = index == 0
    free = torch.cuda.mem_get_info(0)[0] if opened else Unknown("only the first GPU is opened")
    pci_id = (
        Unknown("this torch doesn't report it")
        if bus is None
        else f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    )
    return Gpu(
        name=properties.name,
        target=target or f"sm_{properties.major}{properties.minor}",
        pci_id=pci_id,
        vram_total_bytes=properties.total_memory,
        vram_free_bytes=free,
        l2_bytes=l2 if l2 else Unknown("this torch doesn't report it"),
        integrated=bool(integrated) if integrated is not None else Unknown("this torch doesn't report it"),
        link_under_load=_link_under_load(pci_id) if opened else Unknown("only the first GPU is opened"),
    )


def _link_under_load(pci_id: str | Unknown) -> Link | Unknown:
    """The link while copies keep it busy: an idle one trains down to save power."""
    if isinstance(pci_id, Unknown):
        return pci_id
    card = Unknown("HIP has no NVML") if torch.version.hip else open_card(pci_id)
    try:
        host = torch.empty(LOAD_WORDS, dtype=torch.int64, pin_memory=True)
        device = torch.empty_like(host, device="cuda")
        for _ in range(LOAD_COPIES):
            device.copy_(host, non_blocking=True)
        link = read_link(Path("/"), pci_id) if isinstance(card, Unknown) else card.link()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return Unknown(first_line(error))
    return link


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextmanager
def refusals(wanted: str, way_out: str = "") -> Iterator[None]:
    """Maps torch's errors for want of memory (VRAM, pinned, the host's) to ours. Others pass."""
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, torch.cuda.OutOfMemoryError)
        if not (known or any(words in str(error) for words in _NO_MEMORY)):
            raise
        raise OutOfMemory(f"{wanted} were refused: {first_line(error)}", way_out) from None


# ---- claims about the card, tried ----------------------------------------------------------------------

DEVICE = "cuda"
SIDE = 256  # of the matrices: large enough for a library's own kernels, small enough for any card
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.5}  # of sums of SIDE products of normal numbers


def checks() -> Iterator[Check]:
    """What torch and its libraries promise for the first card, tried one by one; the results are compared
    with the CPU's. A library without kernels for the card may end the process: the last check shows where.
    """
    yield _tried("kernels for the card", _kernels)
    yield _tried("a copy there and back", _copy)
    for dtype in TOLERANCE:
        name = str(dtype).removeprefix("torch.")
        yield _tried(f"a matrix product, {name}", partial(_product, dtype))
    yield _tried("a convolution", _convolution)


def _tried(name: str, claim: Callable[[], tuple[bool, str]]) -> Check:
    try:
        holds, said = claim()
    except (RuntimeError, OSError) as error:
        return Check(name, holds=False, said=first_line(error))
    return Check(name, holds, said)


def _kernels() -> tuple[bool, str]:
    """Whether the build lists the card's target. PTX, which serves later cards, is listed as compute_NN."""
    target = _gpu(0).target
    listed = torch.cuda.get_arch_list()
    return any(serves(name, target) for name in listed), f"{target} in {' '.join(listed)}"


def serves(name: str, target: str) -> bool:
    """Whether code for `name` runs on a card: CUDA promises it within a major version, AMD doesn't."""
    kind, _, number = name.partition("_")
    wanted = target.removeprefix("sm_")
    if not target.startswith("sm_") or not (number.isdecimal() and wanted.isdecimal()):
        return name.partition(":")[0] == target
    if kind == "compute":
        return int(number) <= int(wanted)
    return int(number) // 10 == int(wanted) // 10 and int(number) <= int(wanted)


def _copy() -> tuple[bool, str]:
    content = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    back = content.to(DEVICE).to("cpu")
    return bool(torch.equal(content, back)), "1 MiB of random bytes"


def _product(dtype: torch.dtype) -> tuple[bool, str]:
    left, right = (torch.randn(SIDE, SIDE, dtype=torch.float32) for _ in range(2))
    product = (left.to(DEVICE, dtype) @ right.to(DEVICE, dtype)).to("cpu", torch.float32)
    error = float((product - left @ right).abs().max())
    most = TOLERANCE[dtype]
    return error <= most, f"largest error {error:.2g} against the CPU, {most:g} accepted"


def _convolution() -> tuple[bool, str]:
    images, weights = torch.randn(1, 3, 32, 32), torch.randn(4, 3, 3, 3)
    result = torch.conv2d(images.to(DEVICE), weights.to(DEVICE)).to("cpu")
    error = float((result - torch.conv2d(images, weights)).abs().max())
    return error <= 1e-2, f"largest error {error:.2g} against the CPU, 0.01 accepted"

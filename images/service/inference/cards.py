"""Checks that a pruned image holds code for this machine's AMD card, before torch starts the GPU runtime.

The image's manifest lists what a prune kept; the kernel's KFD topology lists the cards.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.errors import DeviceMissing

MANIFEST = Path(__file__).parents[3] / "weir-prune.json"  # /opt/weir/weir-prune.json
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)
_OVERRIDE = re.compile(r"(\d{1,2})\.(\d)\.(\d{1,2})")


def check_cards(device: str, env: Mapping[str, str]) -> None:
    """Raises DeviceMissing when a GPU is asked for and the image holds code for none of the cards here."""
    if not device.strip().lower().startswith("cpu"):
        refuse_foreign(held_targets(MANIFEST), card_targets(TOPOLOGY, env))


def refuse_foreign(held: Sequence[str], cards: Sequence[str]) -> None:
    """Raises DeviceMissing when none of the cards is among what a pruned image holds. Pure.

    No `held`: the image isn't pruned. No `cards`: the search for the device has a better message. An image
    for a family (`gfx11-generic`) is assumed to have it.
    """
    processors = {target.partition(":")[0] for target in held}
    family = any(name.endswith("-generic") for name in processors)
    if not held or not cards or family or processors.intersection(cards):
        return
    raise DeviceMissing(
        f"this image holds {', '.join(held)}, this machine has {', '.join(cards)}",
        f"rebuild it on the host: make images GPU_TARGETS={','.join(cards)}",
    )


def held_targets(manifest: Path) -> tuple[str, ...]:
    """AMD targets that a prune kept, by its manifest; none for an image that wasn't pruned."""
    try:
        targets = json.loads(manifest.read_text())["targets"]
        return tuple(name for name in targets if name.startswith("gfx"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()


def card_targets(topology: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Targets of the AMD cards, each once; the target that HSA_OVERRIDE_GFX_VERSION names, if it is set."""
    texts = [_read(path) for path in sorted(topology.glob("*/properties"))]
    versions = {int(match[1]) for text in texts for match in _VERSION.finditer(text)} - {0}
    override = _OVERRIDE.fullmatch(env.get("HSA_OVERRIDE_GFX_VERSION", ""))
    if versions and override:
        major, minor, step = map(int, override.groups())
        versions = {major * 10000 + minor * 100 + step}
    return tuple(f"gfx{v // 10000}{v // 100 % 100:x}{v % 100:x}" for v in sorted(versions))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""Checks that a pruned image holds code for this machine's AMD card, before torch starts the GPU runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probes.core import files
from probes.core.codec import load
from probes.hardware import sysfs

MANIFEST = Path("/opt/weir/weir-prune.json")
MOST_BYTES = 64 << 20  # of the manifest, as the pruner has it; that of a whole ROCm tree has 1 MB


def foreign_card(root: Path, env: Mapping[str, str], manifest: Path = MANIFEST) -> str:
    """The message for a pruned image without code for any of the cards here; empty when there is code.

    With HSA_OVERRIDE_GFX_VERSION set, cards count as the target that it names.
    """
    cards = list(sysfs.kfd_targets(root))
    override = env.get("HSA_OVERRIDE_GFX_VERSION", "").split(".")
    if cards and len(override) == 3 and all(part.isdecimal() for part in override):
        major, minor, step = map(int, override)
        cards = [sysfs.gfx_target(major * 10000 + minor * 100 + step)]
    return mismatch(held_targets(manifest), cards)


def mismatch(held: Sequence[str], cards: Sequence[str]) -> str:
    """The message; empty where the image isn't pruned, no card is known, or the image has code for one.

    An image for a family (`gfx11-generic`) is assumed to have it.
    """
    processors = {target.partition(":")[0] for target in held}
    family = any(name.endswith("-generic") for name in processors)
    if not held or not cards or family or processors.intersection(cards):
        return ""
    names = ",".join(cards)
    return (
        f"this image holds {', '.join(held)}, this machine has {', '.join(cards)}: "
        f"rebuild it with `make images GPU_TARGETS={names}`"
    )


def held_targets(manifest: Path) -> tuple[str, ...]:
    """AMD targets that a prune kept, by its manifest; none for an image that wasn't pruned."""
    try:
        document: Any = load(files.read_text(manifest, most_bytes=MOST_BYTES))
        return tuple(name for name in document["targets"] if name.startswith("gfx"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ()

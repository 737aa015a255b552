"""What a placed model's weights may take of this machine's host memory."""

from pathlib import Path

from probes.core.errors import PlacementError, Unsupported
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.hardware.host import available_bytes, floor_bytes, spendable_bytes
from probes.placement.types import LOADING_BYTES, Plan


def bytes_for_weights(asked: int | None) -> int | None:
    """What was asked for, else what is available above a floor.

    None: unknown, so what the machine's profile says.
    """
    available = available_bytes(Path("/"))
    if asked is not None or isinstance(available, Unknown):
        return asked
    return spendable_bytes(available, floor_bytes(available))


def require_plan(made: Plan, host: int) -> None:
    """Raise PlacementError for a plan that was made for a machine with more host memory than `load` finds."""
    taken = made.host.pinned + made.host.pageable + LOADING_BYTES
    if taken > host:
        raise PlacementError(
            f"the plan takes {binary_bytes(taken)} of host memory, and {binary_bytes(host)} are free here",
            f"plan again with --host {host >> 20}MiB, or end other programs",
        )


def require_whole(weight_bytes: int, host: int) -> None:
    """Peers start from weights in host memory. Raises Unsupported where they don't fit there."""
    if weight_bytes > host:
        raise Unsupported(
            f"--compare needs the whole model in host memory: {binary_bytes(weight_bytes)}, and it may take "
            f"{binary_bytes(host)}",
            "run it without --compare, or raise --host",
        )

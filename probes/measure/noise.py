"""Finds other activity during a measurement, from the machine's state before and after it. Pure.

Each flag begins with its subject: `foreign` users of the GPU, `host` load, `throttled` clocks.
"""

from dataclasses import dataclass

from probes.records.schema import Noise, Unknown
from probes.shared.units import binary_bytes

# A kernel alone takes 20 us from call to end, a small copy 30 us; next to a process that computes or copies,
# both wait for its turns: 1 to 2.5 ms (measured on an H200, see docs/probes.md).
WAITED_S = 500e-6
IDLE_LINK_BYTES_PER_S = 100 * 10**6  # an idle link carries a few MB/s
DRIFT_BYTES = 256 * 2**20  # our own libraries load kernels lazily, which takes tens of MiB
BUSY_SHARE = 0.25  # of the processors, used by others
SHORTEST_S = 0.1  # the kernel counts processor time in steps of 10 ms


@dataclass(frozen=True)
class Look:
    """The machine at a moment at which this process leaves the GPU idle."""

    at_s: float  # of a clock that only goes forward
    cpus: int
    busy_cpu_s: float | Unknown  # of the whole machine since its start
    own_cpu_s: float
    gpu_processes: int | Unknown  # that compute on it, this one included
    foreign_percent: int | Unknown  # of the GPU, by the busiest other process since the previous observation
    link_bytes_per_s: int | Unknown
    foreign_vram_bytes: int | Unknown
    slowdowns: tuple[str, ...] | Unknown
    kernel_s: float | Unknown  # from call to end, the middle one of a few
    copy_s: float | Unknown


def judge(before: Look, after: Look) -> Noise:
    """Every disturbance that the two observations show, and the signals that were missing."""
    flags = [*_foreign(before, after), *_host(before, after), *_throttled(before, after)]
    missing = [
        f"{what}: {value.reason}"
        for what, value in (
            ("processes on the GPU", after.gpu_processes),
            ("their use of it", after.foreign_percent),
            ("link traffic", after.link_bytes_per_s),
            ("other processes' VRAM", after.foreign_vram_bytes),
            ("throttling", after.slowdowns),
            ("waiting kernels", after.kernel_s),
            ("host load", after.busy_cpu_s),
        )
        if isinstance(value, Unknown)
    ]
    return Noise(tuple(flags), tuple(missing))


def _foreign(before: Look, after: Look) -> list[str]:
    looks = (before, after)
    flags = []
    others = max((look.gpu_processes for look in looks if isinstance(look.gpu_processes, int)), default=1) - 1
    if others > 0:
        flags.append(f"foreign: {others} more process{'es' if others > 1 else ''} on the GPU")
    if isinstance(after.foreign_percent, int) and after.foreign_percent > 0:
        flags.append(f"foreign: another process used {after.foreign_percent}% of the GPU")
    traffic = max((x.link_bytes_per_s for x in looks if isinstance(x.link_bytes_per_s, int)), default=0)
    if traffic > IDLE_LINK_BYTES_PER_S:
        flags.append(f"foreign: {traffic / 1e9:.1f} GB/s on the link while this process was idle")
    for what, waits in (("kernel", [x.kernel_s for x in looks]), ("copy", [x.copy_s for x in looks])):
        longest = max((wait for wait in waits if isinstance(wait, float)), default=0.0)
        if longest > WAITED_S:
            flags.append(f"foreign: a small {what} had to wait {longest * 1e3:.1f} ms")
    a, b = before.foreign_vram_bytes, after.foreign_vram_bytes
    if isinstance(a, int) and isinstance(b, int) and abs(b - a) > DRIFT_BYTES:
        flags.append(f"foreign: other processes' VRAM changed by {binary_bytes(abs(b - a))}")
    return flags


def _host(before: Look, after: Look) -> list[str]:
    took = after.at_s - before.at_s
    if isinstance(before.busy_cpu_s, Unknown) or isinstance(after.busy_cpu_s, Unknown) or took < SHORTEST_S:
        return []
    others = (after.busy_cpu_s - before.busy_cpu_s - (after.own_cpu_s - before.own_cpu_s)) / took
    if others <= max(BUSY_SHARE * after.cpus, 0.5):
        return []
    return [f"host: other programs used {others:.1f} of {after.cpus} CPUs"]


def _throttled(before: Look, after: Look) -> list[str]:
    found = {word for look in (before, after) if isinstance(look.slowdowns, tuple) for word in look.slowdowns}
    return [f"throttled: {word}" for word in sorted(found)]

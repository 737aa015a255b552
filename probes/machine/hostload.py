"""What the whole machine is doing, from the text of the kernel's files. Pure.

Formats: proc(5); Documentation/admin-guide/iostats.rst.
"""

import os
import re

from probes.shared.unknown import Unknown

SECTOR = 512  # bytes, in /proc/diskstats whatever the device's own sectors are
_TICKS = os.sysconf("SC_CLK_TCK")
# partitions, and devices whose traffic another one in the list carries or that are memory
_NOT_WHOLE = re.compile(
    r"(?:loop|ram|zram|dm-|md|sr|fd)\d|(?:sd|hd|vd|xvd)[a-z]+\d|(?:nvme\d+n\d+|mmcblk\d+)p\d"
)


def busy_cpu_s(stat: str) -> float | Unknown:
    """Processor seconds spent on programs and the kernel since the start, by the text of /proc/stat."""
    found = re.match(r"cpu +((?:\d+ ?)+)", stat)
    if not found:
        return Unknown("no processor times in /proc/stat")
    user, nice, system, _idle, _iowait, irq, softirq, *_ = [*map(int, found[1].split()), *[0] * 7]
    return (user + nice + system + irq + softirq) / _TICKS


def memory_bytes(meminfo: str, key: str) -> int | Unknown:
    """A figure of the text of /proc/meminfo, which counts in KiB (and writes kB)."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else Unknown(f"no {key} in /proc/meminfo")


def disk_bytes(diskstats: str) -> tuple[int, int] | Unknown:
    """Bytes read from and written to all whole disks since the start, by the text of /proc/diskstats."""
    rows = [line.split() for line in diskstats.splitlines()]
    disks = [row for row in rows if len(row) >= 10 and not _NOT_WHOLE.match(row[2])]
    if not disks:
        return Unknown("no disk in /proc/diskstats")
    return sum(int(row[5]) for row in disks) * SECTOR, sum(int(row[9]) for row in disks) * SECTOR

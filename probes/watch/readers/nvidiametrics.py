"""Performance metrics of an NVIDIA card (NVML's GPM), between two readings.

Names, structures and ids: NVML API reference.
"""

from collections.abc import Sequence
from ctypes import Structure, byref, c_char_p, c_double, c_int, c_uint, c_void_p

from probes.machine.nvml import Nvml
from probes.shared.unknown import Unknown

# NVML_GPM_METRIC_*
SM_ACTIVE, SM_OCCUPANCY, TENSOR, DRAM = 2, 3, 5, 10
SENT_MIB_PER_S, RECEIVED_MIB_PER_S = 20, 21
MOST_METRICS = 512  # of a request: more than any NVML has


class _GpmMetric(Structure):
    _fields_ = (
        ("metric", c_uint),
        ("code", c_int),
        ("value", c_double),
        ("short_name", c_char_p),
        ("long_name", c_char_p),
        ("unit", c_char_p),
    )


class _GpmRequest(Structure):
    _fields_ = (
        ("version", c_uint),
        ("count", c_uint),
        ("before", c_void_p),
        ("after", c_void_p),
        ("metrics", _GpmMetric * MOST_METRICS),
    )


class _GpmSupport(Structure):
    _fields_ = (("version", c_uint), ("supported", c_uint))


class Performance:
    """Metrics over the time between two readings (GPM), on Hopper and later cards that aren't partitioned."""

    def __init__(self, nvml: Nvml, pci_id: str) -> None:
        self._nvml = nvml
        handle = nvml.handle(pci_id)
        self._handle = handle if isinstance(handle, c_void_p) else c_void_p()
        self._missing = handle if isinstance(handle, Unknown) else self._begin()
        self._request = _GpmRequest(version=1)
        self._samples = [] if self._missing else [self._sample(), self._sample()]
        self._taken = False

    def _begin(self) -> Unknown | None:
        support = _GpmSupport(version=1)
        failed = self._nvml.call("nvmlGpmQueryDeviceSupport", self._handle, byref(support))
        mig, pending = c_uint(), c_uint()
        if (
            not self._nvml.call("nvmlDeviceGetMigMode", self._handle, byref(mig), byref(pending))
            and mig.value
        ):
            return Unknown("the card is partitioned (MIG); its metrics are the partitions'")
        if failed or support.supported:
            return failed
        return Unknown("this card has no such counter (NVML's GPM begins with Hopper)")

    def _sample(self) -> c_void_p:
        found = c_void_p()
        self._missing = self._missing or self._nvml.call("nvmlGpmSampleAlloc", byref(found))
        return found

    @property
    def works(self) -> bool:
        """Whether this card has them."""
        return not self._missing

    def read(self, ids: Sequence[int]) -> dict[int, float | Unknown]:
        """Values by metric id since the last reading; the first one is unknown."""
        if self._missing:
            return dict.fromkeys(ids, self._missing)
        before, after = self._samples
        failed = self._nvml.call("nvmlGpmSampleGet", self._handle, after)
        if failed:
            self._taken = False
            return dict.fromkeys(ids, failed)
        self._samples = [after, before]
        if not self._taken:
            self._taken = True
            return dict.fromkeys(ids, Unknown("measured between two readings, and this is the first"))
        return self._between(ids, before, after)

    def _between(self, ids: Sequence[int], before: c_void_p, after: c_void_p) -> dict[int, float | Unknown]:
        request = self._request
        request.count, request.before, request.after = len(ids), before, after
        for at, one in enumerate(ids):
            request.metrics[at].metric = one
        failed = self._nvml.call("nvmlGpmMetricsGet", byref(request))
        return {
            one: failed or (self._nvml.words(int(metric.code)) if metric.code else float(metric.value))
            for one, metric in zip(ids, request.metrics[: len(ids)], strict=True)
        }

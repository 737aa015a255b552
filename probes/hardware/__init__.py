"""Reads what this machine has: every reader of sysfs, procfs, cgroups, NVML and torch's device properties.

snapshot: the whole machine, and its facts as lines. host: container, limits, memory, processors, disks.
numa: NUMA nodes, and binding to them. sysfs: cards, the KFD topology, DRM clients. gpu_metrics: AMD's table
of that name. nvml: NVIDIA's library. energy: energy counters. torch_build: what torch can compute on (imports
torch). prune_manifest: whether a pruned image has code for the card. expectation: what an over-allocation
does here. What `watch` reads several times a second is read in probes/watch/readers.py and gpu_readers.py.
"""

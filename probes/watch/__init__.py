"""Samples of a machine's gauges and its cards', on their own or while a command runs.

`watcher` is a watch from beginning to end. It samples `readers` (the host) and `gpu_readers` (the cards),
adds up `totals`, and shows and records samples: `screen`, `recording`, `metrics_server`. `command` runs the
command; `allocator` reads what `allocator_hook` reports from inside it about torch's memory.
"""

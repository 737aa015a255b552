"""`weir probe throughput`: how much a device does over batch size, and what limits it."""

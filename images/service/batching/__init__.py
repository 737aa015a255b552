"""Computing requests of different callers together.

batcher   which waiting rows share a batch, and which requests the queue refuses (429); values only
worker    the one thread that computes; what the event loop submits and awaits
health    whether the device still works; values only
"""

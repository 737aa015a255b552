"""Byte streams from outside, read within limits: decompression, tar headers, faults."""

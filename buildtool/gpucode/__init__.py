"""GPU machine code in files: which cards it is for, where it is, and how to remove other cards' code.

Pure and self-contained: no engine, no other program, no network.
"""

"""GPU machine code in files: which cards it is for, where it lies, and how to take foreign cards' code out.

Pure and self-contained: no engine, no other program, no network.
"""

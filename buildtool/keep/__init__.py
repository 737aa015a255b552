"""What of an image a slim one holds, by a list of what observed runs opened. Pure but for the list's file.

`keep_list` is the file, `margin` decides what stays beside its files, by `imports` (Python's import
statements) and `symbols` (what ELF files link to).
"""

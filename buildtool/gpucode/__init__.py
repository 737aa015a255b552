"""GPU machine code in files: which cards it is for, where it is, and how to remove other cards' code.

- `target`: processors and features (`TargetId`), and which code serves which card.
- `source`: a file's bytes by position, and the errors of this package.
- `scan`: what code a file holds (`scan_file`); `bundle`, `nvfatbin`, `elf`: the formats.
- `cut`: plans a prune (`plan_prune`); `cut_bundles`: its part inside a section; `plan`: the plan as a value.
- `verify`: checks what was written against the original (`verify_prune`).

Self-contained: no engine, no other program, no network. Nothing here writes files; `prune` does.
"""

"""GPU machine code in files: which cards it is for, where it is, and how to remove other cards' code.

- `target`: processors and features (`TargetId`), and which code serves which card.
- `source`: a file's bytes by position, and the errors of this package.
- `forward`: reading a file in one pass, at hand or streaming by; what GPU code begins with.
- `scan`: what code a file holds (`scan_file`), and where; `bundle`, `nvfatbin`, `frame`,
  `lz4`, `elf`: the formats.
- `cut`: plans a prune (`plan_prune`); `cut_bundles`: its part inside a section; `plan`: plans as values.
- `verify`: checks what was written against the original (`verify_prune`).

Self-contained: no engine, no other program, no network. Nothing here writes files; `prune` does.
"""

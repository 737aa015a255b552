"""What every package of buildtool shares; imports none of them.

errors.py      ToolError and its subclasses, each with the exit code of `weir`
model.py       the values of a build: Variant, Resolved, Wheel, BuiltImage
files.py       reads, writes and locks files; failures are our errors
command.py     runs other programs; the only module that may
parallel.py    runs tasks in threads
progress.py    lines of progress on standard error
json_text.py   JSON as Docker reads it, and parts of it unparsed
yaml_text.py   YAML with the line of each key; the only module that imports yaml
compression.py zstd and zlib with one interface
shipped.py     where the files that come with the tool are, and where caches go
"""

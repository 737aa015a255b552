"""The Docker engine and image registries.

client.py      Engine: inspect, tag, save, load, run
connection.py  finds the engine as the Docker CLI does; the docker package's errors as ours
buildx.py      bake_plan(): builds, by `docker buildx bake`
registry.py    push() and pull(), by the CLI with its credentials
registry_api.py  registries by their HTTP API
tags.py        temporary tags, and moving several tags at once
reference.py   parses names of images; pure
proof.py       judges the output of an image's smoke test; pure
host.py        engine, plugins, disk space and AMD cards of this host
provision.py   installs and starts an engine on Debian and Ubuntu
"""

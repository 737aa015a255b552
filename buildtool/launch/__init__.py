"""Hands a command and an image to an engine that exists: Slurm, SkyPilot, Kubernetes, torchrun here.

`job.py` has the description, `words.py` the command that every engine starts; `slurm.py`, `kubernetes.py`,
`skypilot.py` and `local.py` render, check, submit and follow it; `engines.py` lists them, `collect.py` finds
what the nodes have reported. Nothing here schedules, restarts or queues.
"""

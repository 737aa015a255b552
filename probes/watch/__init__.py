"""Watching a machine: its cards, its processes, itself, four times a second and beside a command."""

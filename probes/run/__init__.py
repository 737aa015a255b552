"""Runs probes in separate processes and keeps every record."""

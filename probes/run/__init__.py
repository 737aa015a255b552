"""Runs probes in processes of their own and keeps every record."""

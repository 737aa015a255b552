"""Probe reports told on the host: one HTML page with plots, a comparison of two, metrics for Prometheus.

A report is read with `probes.report`; what it means is derived by `probes`' own pure modules, so the page
says what `python -m probes show` says. Nothing here measures, and nothing here imports torch.
"""

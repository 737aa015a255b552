"""Derives figures and answers from a report and writes them as text, metrics and comparisons."""

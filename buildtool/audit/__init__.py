"""Reads images without extracting them and reports where their bytes are."""

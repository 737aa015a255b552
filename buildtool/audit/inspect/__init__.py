"""Looks inside files that stream by: GPU code, debug information, credentials."""

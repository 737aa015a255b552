"""Samples of a watch, added up."""

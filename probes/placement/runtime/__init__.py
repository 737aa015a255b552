"""Runs a placed model: each block's weights are there when it is called."""

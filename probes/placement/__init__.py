"""Plans where a model's weights are placed, and runs a model placed that way."""

"""What a pass or a training step takes, from sizes alone: no torch, no GPU, no weights."""

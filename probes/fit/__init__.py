"""What fits into a byte budget: the largest batch and the longest sequence, predicted and measured."""

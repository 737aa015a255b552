"""Packed tensors kept on disk, by content: what was packed once is read, not packed again."""

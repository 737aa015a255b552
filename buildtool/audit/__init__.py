"""Reading images without extracting them, and saying where their bytes are."""

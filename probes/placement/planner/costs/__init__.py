"""What one block costs in each tier: seconds on each lane, bytes of each memory."""

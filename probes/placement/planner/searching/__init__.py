"""The search for the quickest placement: counts of options, rings, the order of blocks, a simulated pass."""

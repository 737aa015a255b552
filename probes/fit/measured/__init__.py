"""What fits for real: steps in fresh processes under a cap, and the same step traced without its bytes."""

"""Which tier each block of a model goes to, what that takes and how long a pass should last. No torch."""

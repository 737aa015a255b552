"""Integer programs of a few dozen variables: no more than plans need."""

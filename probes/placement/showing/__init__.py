"""A placement plan for people: as text with a table, and as a picture."""

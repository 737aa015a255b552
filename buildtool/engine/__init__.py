"""The Docker engine and BuildKit: the only code that talks to them, and a host's diagnosis."""

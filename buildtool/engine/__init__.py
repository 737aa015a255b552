"""The Docker engine and BuildKit: the only code that talks to them, and what a host has and lacks."""

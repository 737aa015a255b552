"""The answer put together, as text, as a picture and as JSON."""

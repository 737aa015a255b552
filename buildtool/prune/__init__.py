"""Removes GPU code for other cards from files, directory trees, archives and images."""

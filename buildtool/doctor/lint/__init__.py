"""Faults of common guides in Dockerfiles, compose files, scripts, jobs and requirements, by line. Pure."""

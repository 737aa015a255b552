"""Audit reports: the schema, saved reports, comparisons, and the forms they are written in."""

"""Builds image variants: finds the inputs, plans, stages, bakes, proves, audits and records."""

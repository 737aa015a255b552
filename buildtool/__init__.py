"""Weir's host program: builds image variants, audits any image, prunes GPU code. Never imports torch."""

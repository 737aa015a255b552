"""Puts the simulated machine and the samples of reports, which are here, on the path of the tests below."""

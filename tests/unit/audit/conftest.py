"""Puts the makers of images and reports, which are here, on the path of the tests below."""

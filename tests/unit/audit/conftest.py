"""Puts the makers of images and reports, which lie here, on the path of the tests below."""

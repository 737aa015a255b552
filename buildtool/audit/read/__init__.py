"""Reads an image: where its blobs come from, its documents, its layers and their merged tree."""

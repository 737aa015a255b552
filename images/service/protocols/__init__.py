"""What callers send and get, as values: plain JSON, the Open Inference Protocol, embeddings."""

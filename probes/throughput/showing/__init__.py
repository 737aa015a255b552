"""A throughput report as lines and tables, both halves side by side. Pure."""

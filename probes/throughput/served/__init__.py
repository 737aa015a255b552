"""The served half of a throughput scan: a server under rising load."""

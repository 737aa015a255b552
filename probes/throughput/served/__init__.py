"""The served half of a scan: concurrent clients, rising levels, latency and throughput with their errors."""

"""The direct half of a throughput scan: the model is called in this process, without a server."""

"""HTTP and gRPC, over one `Service`. A request passes these files:

connection      accepts connections, with limits of time, number and chunks (uvicorn's private API)
app             the ASGI application: middleware, routes, the steps of an inference, errors
grpc_endpoint   the same for gRPC; imported only where it is asked for
admission       429 and 503: which requests get a slot, which connections stay open
requests        what all formats are parsed into, and their checks (400)
predict, infer  the formats: /predict and /v1/embeddings, and the Open Inference Protocol
service         the state, and the steps from a checked request to its answer
metrics, tracing, spans, page   /metrics, ids of a request, OpenTelemetry, the page at /
"""

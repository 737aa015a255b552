"""A BERT sequence classifier behind HTTP and gRPC: `python3 -m service`; docs/service.md describes it for
users.

    cli, __main__   the program: settings, log, exit code
    settings        the environment and the profile as one value, and every limit (`Limits`)
    server          one process from start to end: signals, loading, draining
    health, listen  the image's health check; addresses, as it needs them too
    models          which models there are; loading, swapping and unloading them
    errors, log     errors with their exit code or status; the log
    api             HTTP and gRPC: connections, admission, requests and answers
    batching        which rows are computed together, the thread that computes, the device's health
    inference       tokenizer and model: everything that uses torch

Standard library, starlette, uvicorn, pyyaml and prometheus_client. Imported only where they are needed: torch
and tokenizers (when a model is loaded), grpc, opentelemetry and huggingface_hub (where the settings ask for
them).
"""

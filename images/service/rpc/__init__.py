"""The Open Inference Protocol over gRPC, where WEIR_GRPC_LISTEN asks for it and grpcio is installed."""

"""The router: Algorithms 1 and 3 over gRPC."""

"""The admission agent: Algorithm 2 and residency of one engine over gRPC."""

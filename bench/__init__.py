"""Benchmarks: what the parts on the path of a turn cost, beside a baseline measured in the same run (docs/benchmarks.md)."""

from services.cli import prepare_grpc

prepare_grpc()  # as `kvc` does, before gRPC is imported

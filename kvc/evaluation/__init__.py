"""Traces, generated workloads, replay against a mesh, and the numbers that come out."""

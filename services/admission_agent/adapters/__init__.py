"""Adapters of the ports to real sockets."""

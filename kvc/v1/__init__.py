"""Generated messages and services of the package kvc.v1; regenerate with `make protos`."""

"""The algorithms as pure functions over values: no I/O, no clock, no logging, no environment."""

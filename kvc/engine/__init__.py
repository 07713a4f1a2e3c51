"""Engines: the link that an admission agent speaks to them, and the reference engine."""

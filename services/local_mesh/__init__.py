"""A whole mesh on one machine: real processes for engines, agents and the router, and the commands that use it."""

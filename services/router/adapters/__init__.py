"""What the router's ports are in the real world."""

"""The services of the mesh, and the command that starts them."""

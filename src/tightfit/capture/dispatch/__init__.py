"""How the virtual GPU answers operators: what has a shape, a value or a kernel of its own, and what is run on the host."""

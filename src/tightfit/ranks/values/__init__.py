"""What goes into a model and comes out of it, taken apart and put together."""

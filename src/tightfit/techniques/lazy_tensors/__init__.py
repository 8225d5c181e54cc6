"""Tensors and gradients whose values are computed when somebody asks for them."""

"""Tensors saved for backward that are copied away after the forward pass and back before their gradients are computed."""

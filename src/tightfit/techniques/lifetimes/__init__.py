"""Tensors freed earlier, and the cache emptied between phases."""

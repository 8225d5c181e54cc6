"""Tensors freed earlier, the cache emptied between phases, and settings of the allocator."""

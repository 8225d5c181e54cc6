"""A traced step of one card as parts: blocks by class, what runs before and after them, their weights, products and batch."""

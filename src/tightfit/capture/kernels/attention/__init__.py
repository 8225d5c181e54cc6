"""Attention: the kernel that a card runs, and its scratch memory."""

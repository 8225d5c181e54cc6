"""Attention without its scores in memory."""

"""Modules run in tiles along one dimension, and the check that tiles are independent."""

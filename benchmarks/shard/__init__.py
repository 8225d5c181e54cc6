"""Predicted against published runs on many cards: `python -m benchmarks.shard`."""

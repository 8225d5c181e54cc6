"""Benchmarks: what the package promises, measured. `python -m benchmarks.accuracy` compares estimates with real cards."""

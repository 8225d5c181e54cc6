"""Predicted against measured on one card: workloads chosen by rule, each in a fresh process. `python -m benchmarks.gpu` (see `__main__`)."""

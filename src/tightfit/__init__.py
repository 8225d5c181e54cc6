"""tightfit makes a PyTorch workload fit the GPU it is given, as fast as it can run there."""

__version__ = "0.1.0"

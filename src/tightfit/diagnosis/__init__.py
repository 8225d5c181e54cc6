"""What a run's memory was used for: leaks, fragmentation, allocation sites, and the difference of two runs."""

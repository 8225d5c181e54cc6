"""Diagnosis of a run's memory: growth, fragmentation, allocation sites, suggestions, and the difference of two runs."""

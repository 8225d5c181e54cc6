"""Measures a GPU and its host: one file per group of measurements, the same code on a real GPU and on a simulated one."""

"""Measures a card and its machine: one file per group of measurements, the same code on a real card and on a simulated one."""

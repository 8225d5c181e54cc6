"""Predicted against published start-ups of serving engines."""

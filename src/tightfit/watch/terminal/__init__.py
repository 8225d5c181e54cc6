"""The machine on a terminal: one table, or a screen with keys."""

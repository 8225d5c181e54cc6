"""The history of a machine in SQLite: written by one agent, read by anybody beside it."""

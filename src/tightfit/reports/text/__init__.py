"""Text for a terminal; one module per command."""

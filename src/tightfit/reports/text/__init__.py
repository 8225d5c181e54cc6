"""Text for a terminal; one file per answer."""

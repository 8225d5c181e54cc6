"""The batch in parts, and the check that each example is computed by itself."""

"""Proves that a computation treats the rows of its inputs (examples, tokens) independently, so that it may be run on parts of them."""

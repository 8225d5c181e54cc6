"""Loops of `generate` that make token after token: a few turns are traced at both ends, and those between are written to the tape from them."""

"""Wrappers around the user's forwards and methods during a session, and their behaviour under autograd."""

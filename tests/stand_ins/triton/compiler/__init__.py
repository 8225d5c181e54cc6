"""The compiler, which torch asks for and does not call."""

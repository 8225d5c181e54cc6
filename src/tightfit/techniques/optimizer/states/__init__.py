"""How states of an optimizer are kept in another form between its steps, and are there for its updates."""

"""Arguments that several commands take, and how they are read."""

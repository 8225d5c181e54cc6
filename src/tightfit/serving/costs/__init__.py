"""Memory and time of one step of a server, from the traced model: for any batch, up to a range."""

"""What stands around the user's own forwards and methods for the time of a session, and what autograd may ask of it."""

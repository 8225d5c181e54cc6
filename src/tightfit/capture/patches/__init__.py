"""What the traced process has in the place of torch's own functions, and of other libraries'."""

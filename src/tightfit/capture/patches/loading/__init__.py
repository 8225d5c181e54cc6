"""What the traced process has in place of parts of torch's data loaders: their largest batches, and how long they take."""

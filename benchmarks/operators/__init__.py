"""Every operator and module of torch's own lists of tests, traced, divided into rows, and in blocks that techniques are applied to."""

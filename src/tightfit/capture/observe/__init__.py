"""What a capture writes down: the tape, whose code it was, streams, and what kernels allocate."""

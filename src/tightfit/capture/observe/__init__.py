"""What a capture records: the tape, attribution to modules and lines, streams, and memory of kernels."""

"""What executes a plan: saved tensors, optimizer executors, streamed parameters, pinned and disk storage."""

"""Counters of torch's allocator, from programs that publish them to the agent of their machine."""

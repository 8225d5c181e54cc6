"""Recordings of torch's memory allocator (memory snapshots): reading without running code, replaying, recording, writing."""

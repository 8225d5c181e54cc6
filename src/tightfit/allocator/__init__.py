"""The caching allocators of torch, replayed: pools, segments, expandable segments, settings, counters."""

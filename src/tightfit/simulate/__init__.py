"""From a tape to the memory and the time of a card: the caching allocator, streams, and the three peaks."""

"""From a tape to the memory and the time of a card: workspaces, the timeline of bytes, and the three peaks."""

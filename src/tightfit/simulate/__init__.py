"""From a tape to memory on a GPU: workspaces, the memory timeline, the three peaks and their uncertainty."""

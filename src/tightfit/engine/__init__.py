"""Host memory as a far tier of a card's: storages that are copied away and back beside the computation."""

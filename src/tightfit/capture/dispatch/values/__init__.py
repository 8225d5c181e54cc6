"""Values on a card that has none: those that are known all the same, reads of the others, and conditions that depend on them."""

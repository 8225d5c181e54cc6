"""Which card, weights, cache and settings serve a model best: candidates, what each is worth, and the choice."""

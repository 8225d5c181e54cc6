"""Models traced as a server runs them: without gradients, with a cache of keys and values, on tokens of several requests at once."""

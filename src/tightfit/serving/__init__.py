"""What a language model needs to be served: weights, cache of keys and values, the batch that an engine measures; and how many requests that leaves room for."""

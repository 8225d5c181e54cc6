"""The model that is served: its sizes, the formats of its weights, and its cache of keys and values."""

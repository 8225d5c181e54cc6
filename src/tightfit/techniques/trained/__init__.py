"""Training fewer parameters: freezing, adapters."""

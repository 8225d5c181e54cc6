"""Engines that take all of a card for a batch of requests: `generate` of transformers, and llama.cpp, whose layers may stay at the host."""

"""Processes of ours: they do one thing, begin fast, and never outlive the process that asked for them."""

"""A server under load: requests that arrive, wait, are computed together, are preempted, and end, simulated step by step."""

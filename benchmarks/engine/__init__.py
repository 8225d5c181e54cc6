"""The memory engine, measured: what is moved and what that costs, whether it is exact, what it reaches and how it fails."""

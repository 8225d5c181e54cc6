"""The machine in a browser: a small server of one page, its data, and metrics."""

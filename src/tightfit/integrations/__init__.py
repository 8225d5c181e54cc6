"""One file per framework, each importable alone."""

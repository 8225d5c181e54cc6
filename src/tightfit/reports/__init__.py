"""Recorded data to text and files; one file per output. Never looks at live objects."""

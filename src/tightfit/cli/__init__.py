"""One file per command; data on stdout, talk on stderr."""

"""The command line, one file per command; data on stdout, messages and progress on stderr."""

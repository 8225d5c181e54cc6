"""What several commands share besides arguments: the GPUs of this machine, runs that are read or traced, progress on stderr."""

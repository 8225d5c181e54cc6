"""Out-of-memory errors: recognised, survived by operators and updates that run again, explained in a file; and memory held in reserve."""

"""Child processes: they do one thing, start fast, and never outlive their parent."""

"""What a person could do about the memory of a run: of what its history shows, and of what a profile lets one work out."""

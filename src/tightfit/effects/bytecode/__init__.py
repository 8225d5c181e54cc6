"""What the code of functions says before it runs: its instructions, what it asks of tensors, and what it may write to."""

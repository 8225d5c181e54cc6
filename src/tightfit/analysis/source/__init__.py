"""What a script's source says of values that it carries from step to step. No torch."""

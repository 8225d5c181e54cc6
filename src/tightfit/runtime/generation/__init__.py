"""What a program that generates runs with: another cache of keys and values in `generate`, tried out against the program's own before it is used."""

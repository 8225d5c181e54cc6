"""A layout in the words of the tools that run it: configuration files, arguments and job scripts. No tool is imported; each file says which release's own parser accepted it."""

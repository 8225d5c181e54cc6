"""Side effects of module code: attributes, buffers, random states and globals that it reads and writes besides its inputs and outputs."""

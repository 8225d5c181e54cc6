"""What the code of a module reads and writes besides its inputs and outputs: attributes, buffers, random states, globals."""

"""What a step reaches, and what puts it back: parameters, buffers, gradients, optimizer states and settings at the beginning of a step."""

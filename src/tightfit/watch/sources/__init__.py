"""Where readings come from: the drivers of NVIDIA and AMD, or a simulation, behind one interface."""

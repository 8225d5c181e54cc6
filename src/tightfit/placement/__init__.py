"""Static placement of buffers with known lifetimes: problem, solver, independent validator."""

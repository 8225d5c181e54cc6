"""Static placement of buffers with known lifetimes in one arena: problem, solver, independent validator."""

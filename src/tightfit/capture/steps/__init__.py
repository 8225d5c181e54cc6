"""Where a step begins and ends, whose loop it is, and which calls repeat themselves."""

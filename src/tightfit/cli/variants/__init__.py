"""Forms of a command with code of their own: `run --guard`, `plan` for several GPUs, `estimate` over a sweep."""

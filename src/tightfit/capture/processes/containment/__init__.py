"""A traced program leaves no trace: what it writes is dropped, it reaches no network, and none of its processes outlives it.

`namespaces` does this with the kernel's help, `redirection` in Python where the kernel does not allow it; `policy` says what is allowed.
"""

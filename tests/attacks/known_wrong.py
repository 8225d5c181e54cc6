"""Pairs of attack and technique that are wrong or crash today, each with what is seen. Mended pairs are taken out; it is to be empty.

Written by `python -m tests.attacks.report --write`.
"""

# fmt: off
KNOWN_WRONG: dict[tuple[str, str], str] = {
    ('branches_by_an_operator', 'selective checkpointing'): 'crashed: RuntimeError at _symbolic_trace.py:720: Tracing expected 2 arguments but got 1 concrete arguments',
    ('compiled_as_one_graph', 'offloaded checkpointing, selective'): 'crashed: RuntimeError at eval_frame.py:1202: torch.compile with fullgraph=True found no compiled frames. Sk...',
}

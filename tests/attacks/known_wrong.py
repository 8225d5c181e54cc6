"""Pairs of attack and technique that are wrong or crash today, each with what is seen. Mended pairs are taken out; it is to be empty.

Written by `python -m tests.attacks.report --write`.
"""

# fmt: off
KNOWN_WRONG: dict[tuple[str, str], str] = {
    ('path_length', 'pure bf16'): 'crashed: RuntimeError at second_order.py:296: expected dtype c10::BFloat16 for `end` but got dtype float',
    ('mask_written_before_step', 'update in backward'): 'wrong: refused after 3 steps, but weights.0.head.weight is off by 0.0333: a backward pass that ran twice ga...',
    ('mask_written_before_step', 'update in backward, clips'): 'wrong: refused after 3 steps, but weights.0.head.weight is off by 0.0333: a backward pass that ran twice ga...',
}

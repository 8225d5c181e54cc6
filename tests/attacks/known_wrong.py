"""Pairs of attack and technique that are wrong or crash today, each with what is seen. Mended pairs are taken out; it is to be empty.

Written by `python -m tests.attacks.report --write`.
"""

# fmt: off
KNOWN_WRONG: dict[tuple[str, str], str] = {
    ('taken_off_in_closure', 'pure bf16'): 'wrong: refused after 3 steps, but weights are off by 6.32, having moved by 0.517: pure_bf16: the plan is pu...',
}

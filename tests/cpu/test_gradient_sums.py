"""Gradients of a tensor that is used twice are added in place exactly where autograd does it on real tensors."""

import json
from pathlib import Path

from tests.forked_python import forked_python

FOLDER = Path(__file__).parent / "consistency"


def test_the_same_sums_are_made_in_place_as_in_a_real_backward_pass():
    def counts(how: str) -> dict[str, list[int]]:
        done = forked_python("sums.py", how, cwd=FOLDER, check=True)
        return json.loads(done.stdout)

    real, virtual = counts("real"), counts("virtual")
    assert len(real) == 9
    assert sum(in_place for in_place, _ in real.values()) > 10
    assert sum(out_of_place for _, out_of_place in real.values()) > 5
    assert virtual == real

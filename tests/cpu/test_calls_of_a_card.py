"""The virtual GPU refuses the calls that a card refused, and gives what it gave: dtypes, shapes, strides. The card's answers are in a recording."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "gpu"))
from calls import ALL, CALLS, REFUSED, jobs  # noqa: E402 - a program, which is run beside this too

EVERY = 1 if os.environ.get("TIGHTFIT_SLOW_TESTS") else 8
Found = dict[str, list[tuple[tuple[str, ...], str, str]]]
# The pivots of a least squares problem are of another size.
OTHERS_HERE = {"l_lstsq"}
# Seldom with these arguments, and not refused here.
RUN_HERE = {
    *(
        "heaviside",
        "batch_norm_e",
        "batch_norm_r",
        "index_reduce",
        "soft_margin",
        "huber",
        "cross",
        "l_lstsq",
        "bce_pos",
    ),
    *(
        "polar",
        "complex",
        "conv1d",
        "conv2d",
        "conv3d",
        "convT1d",
        "convT2d",
        "conv1db",
        "conv2db",
        "conv3db",
        "convT1db",
    ),
    *(
        "convT2db",
        "allclose",
        "u_histc",
        "scatter_reduce",
        "masked_select",
        "equal",
        "u_angle",
        "bilinear",
        "pow",
        "addbmm",
    ),
    *("clamp_max_0", "bucketize", "searchsorted", "u_topk2", "u_randint_like", "f_threshold_", "l_solve", "addcmul"),
    *("addcmul_", "sign_u", "nll", "u_sign", "lerp", "logical_and_0", "u_max"),
}


@pytest.fixture(scope="module")
def differences() -> Found:
    """By name, the arguments of the calls with another answer here, the card's, and ours."""
    command = [sys.executable, str(TESTS / "gpu" / "calls.py"), "--virtual", str(EVERY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    recorded = json.loads((TESTS / "recordings" / "calls_on_a_card.json").read_text())
    found: Found = {}
    for name, answers in json.loads(done.stdout).items():
        every = list(jobs(name))
        for number, here in answers.items():
            of_card = recorded[name]["kinds"][ord(recorded[name]["outcomes"][int(number)]) - ord("a")]
            if here != of_card:
                dtypes, devices = every[int(number)]
                told = (*(str(dtype)[6:] for dtype in dtypes), *devices)
                found.setdefault(name, []).append((told, of_card, here))
    return found


def test_no_call_that_a_card_runs_is_refused(differences: Found) -> None:
    found = {name: [row for row in rows if row[2] == REFUSED] for name, rows in differences.items()}
    assert {name: rows for name, rows in found.items() if rows} == {}


def test_results_are_those_of_the_card(differences: Found) -> None:
    found = {name: [row for row in rows if REFUSED not in row[1:]] for name, rows in differences.items()}
    assert {name: rows for name, rows in found.items() if rows and name not in OTHERS_HERE} == {}


def test_calls_that_a_card_refuses_are_refused(differences: Found) -> None:
    found = {
        name: [row for row in rows if row[1] == REFUSED and "complex64" not in row[0]]
        for name, rows in differences.items()
    }
    assert {name: rows for name, rows in found.items() if rows and name not in RUN_HERE} == {}


def test_the_recording_has_every_call_with_both_answers() -> None:
    recorded = json.loads((TESTS / "recordings" / "calls_on_a_card.json").read_text())
    assert {name: len(each["outcomes"]) for name, each in recorded.items()} == {n: len(list(jobs(n))) for n in CALLS}
    kinds = Counter(each["kinds"][ord(o) - ord("a")] == REFUSED for each in recorded.values() for o in each["outcomes"])
    assert min(kinds.values()) > 5000
    assert len(ALL) == 9

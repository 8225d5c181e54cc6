"""What every change of the training code is checked for: it fits the smallest card that is used, and no step holds more than the one before."""

from pathlib import Path

WORKLOAD = f"{Path(__file__).with_name('workload.py')}:workload"


def test_a_training_step_fits_8_gib(assert_fits) -> None:
    assert_fits(WORKLOAD, "RTX 4060", gib=8)


def test_no_step_leaves_more_behind_than_the_one_before(assert_fits) -> None:
    found = assert_fits(WORKLOAD, "RTX 4060", parameters=["batch_size=16"], steps=4)
    left = [span.end_allocated_bytes for span in found.spans if span.kind == "step"]
    assert left[-1] == left[-2], found.explain()

"""The range of a step's seconds: what makes it wider, what does not, and what two plans for one program share."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.timelines import Copy, Kernel, Row, priced_steps, read

from tightfit.cost.doubts import DOUBTS, MACHINE, WORDS, ErrorKind, doubt_of
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.simulate.seconds_band import SecondsBand, ratio_doubt, seconds_band
from tightfit.simulate.step_work import PricedTape
from tightfit.simulate.timeline import seconds_of_steps

CARD = find("RTX 3090")
# The operators of hand-made tapes have no name.
UNNAMED = WORDS[ErrorKind.OTHER]


def band(*rows: Row) -> SecondsBand:
    return seconds_band(priced_steps(rows), CARD)


def named(prices: PricedTape, *names: str) -> PricedTape:
    """The operators of the tape under these names, one each."""
    operators = dataclasses.replace(prices.tape.operators, name=np.arange(1, 1 + len(names), dtype=np.int32))
    return dataclasses.replace(prices, tape=dataclasses.replace(prices.tape, strings=("", *names), operators=operators))


def test_work_of_one_kind_has_its_doubt_and_the_machines() -> None:
    found = band(Kernel(seconds=2.0), Kernel(seconds=2.0))
    shared = DOUBTS[ErrorKind.OTHER].shared
    assert found.more == pytest.approx({UNNAMED: shared, WORDS[ErrorKind.HOST]: 0.0})
    assert found.high_seconds == pytest.approx(4.0 * math.exp(math.hypot(shared, MACHINE)))
    assert found.low_seconds == pytest.approx(4.0 * math.exp(-math.hypot(shared, MACHINE)))


def test_a_copy_that_hides_adds_no_doubt_and_one_that_does_not_adds_its_own() -> None:
    link = WORDS[ErrorKind.LINK]
    hidden = band(Copy(stream=1, seconds=2.0), Kernel(seconds=5.0))
    assert hidden.more[link] == pytest.approx(0.0, abs=1e-12)
    waited_for = band(Copy(seconds=2.0), Kernel(seconds=5.0))
    assert waited_for.more[link] == pytest.approx(math.log((2.0 * math.exp(DOUBTS[ErrorKind.LINK].shared) + 5.0) / 7.0))
    # A copy that is a little shorter than what hides it may turn out longer.
    nearly = band(Copy(stream=1, seconds=4.8), Kernel(seconds=5.0))
    assert nearly.more[link] > 0 == pytest.approx(nearly.less[link])


def test_a_step_that_waits_for_its_host_has_the_hosts_doubt() -> None:
    found = band(*[Kernel(seconds=0.001, issue=1.0)] * 4, read())
    assert found.largest_causes(1) == [WORDS[ErrorKind.HOST]]
    assert found.more[WORDS[ErrorKind.HOST]] == pytest.approx(DOUBTS[ErrorKind.HOST].shared, rel=0.01)


def test_errors_of_many_sizes_cancel_in_part_and_those_of_one_size_do_not() -> None:
    names = ["aten.convolution"] * 4
    alike = seconds_band(named(priced_steps([Kernel(seconds=2.0)] * 4), *names), CARD)
    mixed = seconds_band(named(priced_steps([Kernel(seconds=n) for n in (1.7, 1.9, 2.1, 2.3)]), *names), CARD)
    shared, own = doubt_of(ErrorKind.CONVOLUTIONS_ON_CORES, CARD)
    (of_alike,), (of_mixed,) = ({v for k, v in b.more.items() if "convolutions" in k} for b in (alike, mixed))
    assert of_alike == pytest.approx(math.hypot(shared, own))
    assert shared < of_mixed < 0.7 * math.hypot(shared, own)


def test_a_card_without_measurements_is_known_less_and_one_that_was_calibrated_better() -> None:
    products = ErrorKind.PRODUCTS_ON_TILES
    measured, of_same_kind, of_none = (doubt_of(products, find(name))[0] for name in ("RTX 3090", "A40", "V100"))
    assert measured < of_same_kind < of_none
    calibrated = Calibration(device="A40", efficiency={"matmul": 0.8})
    assert doubt_of(products, find("A40"), calibrated)[0] < measured


def test_what_a_large_cache_saves_is_not_known() -> None:
    streaming = ErrorKind.STREAMING
    small, large = (doubt_of(streaming, find(name))[0] for name in ("RTX 3090", "RTX 4090"))
    assert small == DOUBTS[streaming].shared < large
    assert doubt_of(streaming, find("H200"))[0] < large


def test_cards_whose_kernels_were_not_measured_alone_are_known_less() -> None:
    products = ErrorKind.PRODUCTS_ON_CORES
    assert doubt_of(products, find("A100 80GB PCIe"))[0] < doubt_of(products, find("MI210"))[0]


def test_what_is_common_to_two_plans_does_not_make_their_order_doubtful() -> None:
    plain, slower = band(Kernel(seconds=5.0)), band(Kernel(seconds=5.0), Kernel(seconds=1.0))
    with_copies = band(Kernel(seconds=5.0), Copy(seconds=1.0))
    assert ratio_doubt(plain, plain) == ratio_doubt(plain, slower) < 0.02
    assert ratio_doubt(plain, with_copies) > 0.02
    assert ratio_doubt(plain, with_copies) == ratio_doubt(with_copies, plain)


def test_without_a_step_there_is_no_range() -> None:
    nothing = seconds_band(priced_steps([Kernel(seconds=0.0)]), CARD)
    assert (nothing.low_seconds, nothing.high_seconds, nothing.more) == (0.0, 0.0, {})


rows = st.lists(
    st.one_of(
        st.builds(Kernel, seconds=st.floats(0.01, 9.0), stream=st.integers(0, 1), issue=st.floats(0.0, 1.0)),
        st.builds(Copy, seconds=st.floats(0.01, 9.0), stream=st.integers(0, 1), issue=st.floats(0.0, 1.0)),
    ),
    min_size=1,
    max_size=8,
)


@given(rows)
def test_the_likely_seconds_are_within_the_range(step: list[Row]) -> None:
    prices = priced_steps(step)
    found = seconds_band(prices, CARD)
    likely = seconds_of_steps(prices)[-1]
    assert found.low_seconds < likely < found.high_seconds
    assert all(more >= -1e-9 for more in [*found.more.values(), *found.less.values()])

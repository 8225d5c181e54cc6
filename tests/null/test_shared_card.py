"""Several servers on one card: together where their shares fit, else in turns, and what each turn holds."""

import dataclasses

from tests.null.test_serving_page import FOUND

from tightfit.serving.choices.shared_card import SharedServer, shared_card
from tightfit.serving.host_memory import Sleep
from tightfit.units import GIB


def server(share: float, asleep: int, host: int) -> SharedServer:
    settings = dataclasses.replace(FOUND.settings, gpu_memory_utilization=share)
    sleep = Sleep(gpu_bytes=asleep * GIB, host_bytes=host * GIB, wake_seconds=1.0)
    # A card of 20 GiB; the context, of half a GiB, is outside of the share.
    return SharedServer(model="m", estimate=dataclasses.replace(FOUND, settings=settings, sleep=sleep))


def test_shares_and_contexts_add_up() -> None:
    found = shared_card("card", 20 * GIB, [server(0.5, 1, 8), server(0.4, 1, 5)])
    assert found.servers[0].awake_bytes == 10 * GIB + GIB // 2
    assert found.together_bytes == 19 * GIB
    assert found.fits_together
    assert shared_card("card", 19 * GIB - 1, found.servers).fits_together is False


def test_in_turns_one_is_awake_and_the_others_keep_what_they_sleep_with() -> None:
    found = shared_card("card", 20 * GIB, [server(0.75, 1, 8), server(0.5, 2, 5), server(0.5, 1, 7)])
    assert not found.fits_together
    # The first with the two others asleep.
    assert found.in_turns_bytes == 15 * GIB + GIB // 2 + 3 * GIB
    assert found.fits
    # While the second is awake, the weights of the two others are at the host.
    assert found.host_bytes == (8 + 7) * GIB
    assert not shared_card("card", 18 * GIB, found.servers).fits


def test_one_that_does_not_fit_by_itself_is_no_answer_for_all() -> None:
    found = shared_card("card", 20 * GIB, [server(0.5, 1, 8), SharedServer(model="n", estimate=None, why="too large")])
    assert not found.fits
    assert found.to_json()["servers"][1]["why"] == "too large"


def test_versions_that_count_neither_graphs_nor_context_take_them_besides() -> None:
    one = server(0.5, 1, 8)
    assert one.estimate is not None
    older = dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, counts_graphs=False))
    assert older.awake_bytes - one.awake_bytes == FOUND.graph_bytes
    counted = dataclasses.replace(one, estimate=dataclasses.replace(one.estimate, non_torch_bytes=GIB))
    assert counted.awake_bytes == 10 * GIB

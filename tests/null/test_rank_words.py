"""What an estimate of a distributed program says of its ranks."""

from typing import Any

from tightfit.reports.rank_estimates import rank_words

ONE: dict[str, Any] = {"role": "every rank", "rank": 0, "peak": {"device_bytes": 1 << 30}, "seconds_per_step": 0.5}


def words(*, communicators: int, collectives: list[dict[str, Any]]) -> str:
    return rank_words(
        {"rank": 0, "world_size": 8, "ranks": [ONE], "communicators": communicators, "collectives": collectives}
    )


def test_a_program_without_groups_is_told_how_to_lay_out_one_model() -> None:
    last = words(communicators=0, collectives=[]).splitlines()[-1]
    assert last.startswith("collectives of a step: none on the GPU, as the program makes no group of its processes")
    assert "tightfit plan --gpus 8" in last


def test_a_program_with_groups_that_sends_nothing_is_not() -> None:
    assert words(communicators=1, collectives=[]).endswith("collectives of a step: none on the GPU")


def test_what_is_sent_is_named() -> None:
    sent = {"kind": "all_reduce", "bytes": 1 << 20, "group_size": 8, "count": 2, "seconds": 0.001}
    last = words(communicators=1, collectives=[sent]).splitlines()[-1]
    assert last == "collectives of a step: 2 all-reduce of 1.0 MiB in all among 8 (1.0 ms)"

"""Techniques on models that DistributedDataParallel or fully_shard wraps, in two processes: right, or refused."""

import os
from pathlib import Path

import pytest
from tests.attacks import ranks
from tests.attacks.harness import Outcome

IS_SLOW = bool(os.environ.get("TIGHTFIT_SLOW_TESTS"))
# What depends on hooks in C++ that no parameter shows, and what does not.
TECHNIQUES = (
    tuple(ranks.TRIED)
    if IS_SLOW
    else (
        "selective checkpointing",
        "micro-batches",
        "update in backward, clips",
        "optimizer offload",
        "pure bf16",
        "freezing",
    )
)
REFUSED = {
    "averaged": {"pure bf16", "freezing"},
    "accumulated": {"pure bf16", "freezing"},
    "sharded": {"pure bf16", "micro-batches", "optimizer offload"},
}


@pytest.mark.parametrize("name", ranks.PROGRAMS if IS_SLOW else REFUSED)
def test_two_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    of_ranks = ranks.verdicts(tmp_path, [name], TECHNIQUES)
    assert len(of_ranks) == 2
    for rank in of_ranks:
        found = {v: verdict for v, verdict in rank[name].items() if verdict.outcome is not Outcome.NO_PLACE}
        bad = {v: each.reason for v, each in found.items() if each.outcome in (Outcome.WRONG, Outcome.CRASHED)}
        assert not bad
        refused = {v for v, each in found.items() if each.outcome is Outcome.REFUSED}
        if name in REFUSED:
            assert refused & set(TECHNIQUES) >= REFUSED[name]
        assert found["selective checkpointing"].outcome is Outcome.RIGHT

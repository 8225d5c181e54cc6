"""A rank has a GPU of its own among those that the environment leaves to the program."""

import pytest

from tightfit.errors import UsageError
from tightfit.ranks.rank_process import _card_of


@pytest.mark.parametrize(
    ("named", "cards"), [(None, ["0", "1"]), ("2,3", ["2", "3"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_ranks_have_different_cards(named: str | None, cards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [_card_of(local) for local in range(2)] == cards


@pytest.mark.parametrize("named", ["2,3", ""])
def test_more_ranks_than_cards_that_may_be_used_are_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES={named} leaves {2 if named else 0} GPUs"):
        _card_of(2)

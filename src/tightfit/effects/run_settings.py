"""What torch itself reads when code runs, for a second run of it later: the states of its random generators, and autocast.

As `torch.utils.checkpoint` restores them (torch/utils/checkpoint.py, `_checkpoint_without_reentrant_generator`), but that nothing is entered where there is
nothing to restore: autocast that is off both times, cards that no tensor is on.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

_HOST = "cpu"
_CARD = "cuda"
_WITHOUT_CHANCE = (_HOST, "meta")


class RunSettings:
    """The states and settings now, for code that is given `tensors`."""

    __slots__ = ("_autocast", "_cards", "_device_type", "_has_cached_casts", "_host", "_is_card_used", "_states")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        devices = {device for tensor in tensors if (device := tensor.device).type not in _WITHOUT_CHANCE}
        self._device_type = next(iter(devices)).type if devices else _HOST
        self._host = torch.get_rng_state()
        self._is_card_used = torch.cuda.is_initialized()
        self._cards: list[Any] = []
        self._states: list[torch.Tensor] = []
        if self._device_type == _CARD:
            self._cards = list(devices)
            self._states = [torch.cuda.get_rng_state(card) for card in self._cards]
        elif devices:
            self._cards, self._states = get_device_states(*tensors)
        self._autocast = [_autocast(each) for each in dict.fromkeys((_HOST, _CARD, self._device_type))]
        self._has_cached_casts = torch.is_autocast_cache_enabled()

    @property
    def has_begun_card(self) -> bool:
        """Whether the card was used for the first time since: what it has drawn from then on cannot be drawn again."""
        return not self._is_card_used and torch.cuda.is_initialized()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restores all of it for a block, and what is there now afterwards."""
        host = torch.get_rng_state()
        cards = [torch.cuda.get_rng_state(card) for card in self._cards] if self._device_type == _CARD else []
        # Where autocast is off both times there is nothing to enter.
        entered = [each for each in self._autocast if each[1] or torch.is_autocast_enabled(each[0])]
        try:
            if not entered and (not self._cards or cards):
                self._put()
                yield
                return
            with ExitStack() as contexts:
                if self._cards and not cards:
                    contexts.enter_context(torch.random.fork_rng(self._cards, device_type=self._device_type))
                self._put()
                for device_type, is_enabled, dtype in entered:
                    contexts.enter_context(
                        torch.autocast(
                            device_type, enabled=is_enabled, dtype=dtype, cache_enabled=self._has_cached_casts
                        )
                    )
                yield
        finally:
            torch.set_rng_state(host)
            for card, state in zip(self._cards, cards, strict=False):
                torch.cuda.set_rng_state(state, card)

    def _put(self) -> None:
        torch.set_rng_state(self._host)
        if self._device_type == _CARD:
            for card, state in zip(self._cards, self._states, strict=True):
                torch.cuda.set_rng_state(state, card)
        elif self._cards:
            set_device_states(self._cards, self._states, device_type=self._device_type)


def _autocast(device_type: str) -> tuple[str, bool, torch.dtype]:
    """Whether autocast is on for a type of devices, and the type that it casts to."""
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

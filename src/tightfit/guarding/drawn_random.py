"""Random states of the process, read and put back: torch's of the host and the cards, and those of Python and numpy."""

import dataclasses
from typing import Any

import torch

from tightfit.effects.random_states import numpy_state, put_python_state, python_state


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TorchRandom:
    """The states of torch's generators: of the host, and of each card that was used."""

    host: torch.Tensor
    cards: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls) -> "TorchRandom":
        """The states now."""
        cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return cls(host=torch.get_rng_state(), cards=tuple(cards))

    def put(self) -> None:
        """Makes them the states again."""
        torch.set_rng_state(self.host)
        if self.cards:
            torch.cuda.set_rng_state_all(list(self.cards))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllRandom:
    """The states of all generators that a data set may draw from while it makes a batch."""

    torch_states: TorchRandom
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> "AllRandom":
        """The states now."""
        return cls(torch_states=TorchRandom.now(), python=python_state(), numpy=numpy_state.get())

    def put(self) -> None:
        """Makes them the states again."""
        self.torch_states.put()
        put_python_state(self.python)
        if not numpy_state.same(numpy_state.get(), self.numpy):
            numpy_state.put(self.numpy)

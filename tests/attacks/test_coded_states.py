"""States in codes, with codes that keep all bits: what a planned run does around them is then that of the plain run, bit for bit.

Models of attacks are too small for 8-bit states: the table's columns try the hooks, and these the states themselves.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from tests.attacks.harness import Outcome, tried
from tests.attacks.places import VARIANTS
from tests.attacks.registry import attacks

from tightfit.techniques.optimizer.states.state_codecs import SIGNED, SQUARES, BlockCodec, Encoded

PROGRAMS = (
    "states_by_reference",
    "moments_by_reference",
    "states_in_order",
)


@pytest.fixture(autouse=True)
def exact_codes() -> Iterator[None]:
    """Codes that are the states themselves, of any size."""

    def takes(_: BlockCodec, name: str, shape: torch.Size) -> bool:
        return (name in SIGNED or name in SQUARES) and shape.numel() > 1

    def encode(_: BlockCodec, name: str, value: torch.Tensor) -> Encoded:
        flat = value.detach().clone().reshape(-1)
        return Encoded(main=flat, rest=flat[:0])

    def decode(_: BlockCodec, name: str, encoded: Encoded, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return encoded.main.clone().view(shape).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        for function in (takes, encode, decode):
            patch.setattr(BlockCodec, function.__name__, function)
        yield


@pytest.mark.parametrize("variant", ["8-bit states", "8-bit states in backward"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_run_is_that_without_codes(name: str, variant: str) -> None:
    exactly = dataclasses.replace(VARIANTS[variant], is_bitwise=True, is_lossy=False)
    verdict = tried(attacks()[name], exactly)
    assert verdict.outcome in (Outcome.RIGHT, Outcome.REFUSED), verdict.reason
